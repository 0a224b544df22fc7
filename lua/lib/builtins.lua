--[[
byte, find, floor, format, match, sub

Functions of Lua's own libraries that runs call often, as locals.
]]
local byte, find, floor = string.byte, string.find, math.floor
local format, match, sub = string.format, string.match, string.sub
