--[[
whole_number(raw) -> the number that a state is, or nil if there is none, or something that we did not write
]]
local function whole_number(raw)
  local number = tonumber(raw)
  if number and number >= 0 and number < 9007199254740992 and number % 1 == 0 then
    return number
  end
  return nil
end
