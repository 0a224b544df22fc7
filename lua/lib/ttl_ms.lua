--[[
ttl_ms(us, jitter_ms) -> the text of milliseconds for PX

TTL of a state that matters for `us` more microseconds. Windows and buckets do not rely on expiry: the state itself has
all the times it needs, and Redis may serve a key up to a millisecond too long. So the TTL is garbage collection only,
and always later than the last time the state could matter: hence the additional second. The jitter prevents states that
were created together from expiring together.

Redis formats a number in an argument as a double, which takes three times as long as %d. This also drops the fraction.
]]
local function ttl_ms(us, jitter_ms)
  return format("%d", us / 1000 + 1000 + jitter_ms)
end
