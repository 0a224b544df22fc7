--[[
warning.lua — tells a descriptor that nears its limits from one that does not, without flickering between the two.

The warning begins when more than `limit` thousandths of one of its limits are used, and ends when less than `burst`
thousandths of each are, whether or not anybody asks at that moment. In between it stays as it was, which is why there is
a state. It never refuses.

State      one integer: the moment until which the warning is remembered, later than it can last without another call;
           absent or past = no warning
Left       0 normal, 1 warning, 2 throttled: a limit of the descriptor, or its cooldown, refuses
Retry      0
Reset      0
Cost       O(1); a write when the warning begins or ends, and while it lasts once in the time the limits take to reset
]]
local warning = {}

function warning.read(raw)
  return whole_number(raw)
end

function warning.spend(state)
  return state, 0, 0, 0
end

-- fared: how the call went for the descriptor's own limits (decide.lua).
function warning.settle(state, spec, now, fared)
  -- Use only falls between calls, so the lowest since the last one was just before this one.
  local warned = fared.usage > spec.limit or (state ~= nil and state > now and fared.lowest >= spec.burst)
  local told = fared.refused and 2 or warned and 1 or 0
  if not warned then
    return nil, told, 0, 0
  end
  -- Once all is as if unused there is nothing to remember. Twice that long, so that not every call has to write.
  if not state or state < now + fared.reset then
    state = now + 2 * fared.reset
  end
  return state, told, 0, 0
end

function warning.write(key, state, _, _, now, jitter_ms)
  if state then
    redis.call("SET", key, string.format("%.0f", state), "PX", ttl_ms(state - now, jitter_ms))
  else
    redis.call("DEL", key)
  end
end

algorithms.warning = warning
