--[[
whole_number(raw) -> the number in a state; nil if there is none, `unknown_form` if it is something else

Redis can add to such a text with INCRBY.
]]
local function whole_number(raw)
  if not raw then
    return nil
  end
  local number = tonumber(raw)
  if number and number < 9007199254740992 and (raw == number or raw == "0" or find(raw, "^[1-9]%d*$")) then
    return number
  end
  return unknown_form
end
