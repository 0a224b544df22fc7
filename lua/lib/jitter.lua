--[[
jitter(now, limit) -> a number from 0 to limit - 1

Depends on the time alone, so that the arguments of a run do not. Times that are close to each other give numbers that
are not: the microsecond selects one of a million points, far apart.
]]
local function jitter(now, limit)
  return now % 1000003 * 7919 % limit
end
