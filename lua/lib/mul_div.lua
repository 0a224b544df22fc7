--[[
mul_div(a, b, c) -> floor(a * b / c), remainder

Lua's numbers are doubles: integers are exact below 2^53, and a limit (32 bits) times a year in microseconds (45 bits)
exceeds that by far. So a large product is computed seven bits of `a` at a time, dividing at each step.

Bounds  a < 2^53, b < 2^53, c < 2^45, all integers >= 0, c >= 1. Exact whenever the quotient is below 2^53.
]]
local function mul_div(a, b, c)
  local product = a * b
  if product < 9007199254740992 then
    local rest = product % c
    return (product - rest) / c, rest
  end
  -- a * b / c = a * whole + a * part / c, with part < c < 2^45, so that (rest + part) * 128 stays below 2^53.
  local whole = floor(b / c)
  local part = b - whole * c
  local quotient, rest = 0, 0
  local digit_value = 1
  while digit_value * 128 <= a do
    digit_value = digit_value * 128
  end
  local left = a
  while digit_value >= 1 do
    local digit = floor(left / digit_value)
    left = left - digit * digit_value
    local sum = rest * 128 + digit * part
    local carry = floor(sum / c)
    quotient = quotient * 128 + carry
    rest = sum - carry * c
    digit_value = digit_value / 128
  end
  return a * whole + quotient, rest
end
