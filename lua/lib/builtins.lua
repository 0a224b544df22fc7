--[[
byte, find, floor, format, match

Functions of Lua's own libraries that runs call often, as locals.
]]
local byte, find, floor = string.byte, string.find, math.floor
local format, match = string.format, string.match
