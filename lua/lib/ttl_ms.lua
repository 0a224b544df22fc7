--[[
ttl_ms(us, jitter_ms) -> milliseconds for PX

How long a state that matters for `us` more microseconds is kept. A window or a bucket never ends by expiry: the state
says itself what it is worth at a given moment, and Redis may serve a key up to a millisecond too long. So this is
garbage collection only, always later than the last moment the state could matter: hence the second on top. The jitter
keeps states that were born together from dying together.
]]
local function ttl_ms(us, jitter_ms)
  return floor(us / 1000) + 1000 + jitter_ms
end
