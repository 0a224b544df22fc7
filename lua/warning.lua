--[[
warning.lua — warning state of a descriptor that approaches its limits, with hysteresis.

The warning begins when more than `limit` thousandths of one of its limits are used, and ends when less than `burst`
thousandths of each are used, whether or not a call arrives at that time. In between the state is unchanged, which is why
it is stored. It never denies.

State      one integer: the time until which the warning is stored, later than it can last without another call; absent
           or past = no warning
Left       0 normal, 1 warning, 2 throttled: a limit of the descriptor, or its cooldown, denies
Retry      0
Reset      0
Cost       O(1); one write when the warning begins or ends, and while it lasts one per reset time of the limits
]]
local warning = {}

function warning.read(raw)
  return whole_number(raw)
end

function warning.spend(state)
  return state, 0, 0, 0
end

-- outcome: that of the descriptor's own limits (watchers.lua).
function warning.settle(state, spec, now, outcome)
  -- Usage only decreases between calls, so its minimum since the last call was just before this one.
  local warned = outcome.usage > spec.limit or (state ~= nil and state > now and outcome.lowest >= spec.burst)
  local level = outcome.denied and 2 or warned and 1 or 0
  if not warned then
    return nil, level, 0, 0
  end
  -- The state is not needed once all limits are reset. Twice that time, so that not every call has to write.
  if not state or state < now + outcome.reset then
    state = now + 2 * outcome.reset
  end
  return state, level, 0, 0
end

function warning.write(key, state, _, _, now, jitter_ms)
  if state then
    redis.call("SET", key, format("%d", state), "PX", ttl_ms(state - now, jitter_ms))
  else
    redis.call("DEL", key)
  end
end

algorithms.warning = warning
