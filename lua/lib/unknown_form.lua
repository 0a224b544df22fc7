--[[
unknown_form

What `read` returns for a state that was not written by this script, or by a later release in another form. It is neither
overwritten nor deleted: the calls that need it are not decided.
]]
local unknown_form = {}
