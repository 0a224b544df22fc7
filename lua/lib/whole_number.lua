--[[
whole_number(raw) -> the number in a state; nil if there is none, or if it was not written by this script
]]
local function whole_number(raw)
  local number = tonumber(raw)
  if number and number >= 0 and number < 9007199254740992 and number % 1 == 0 then
    return number
  end
  return nil
end
