--[[
number32(text, at) -> the big-endian number in the four bytes from `at` on
]]
local function number32(text, at)
  local byte1, byte2, byte3, byte4 = byte(text, at, at + 3)
  return ((byte1 * 256 + byte2) * 256 + byte3) * 256 + byte4
end
