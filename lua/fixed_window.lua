--[[
fixed_window.lua — at most `limit` hits per clock-aligned window, or per calendar window of a time zone.

State      one integer: count * 2^16 + index of its window modulo 2^16; absent = nothing counted
Bounds     count <= 2^36; debt beyond that is not counted
Retry      the end of the window; a cost above the limit is never admitted
Reset      the end of the window
Cost       O(1)
]]
local fixed_window = {}

-- Sets the index of the current window, and the time until it ends. `now` is the same for all calls of a run, so this is
-- computed once for each spec.
local function place_spec(spec, now)
  if spec.placed ~= now then
    local window = spec.window
    local into = now % window
    spec.placed, spec.index, spec.reset = now, (now - into) / window % 65536, window - into
  end
end

local function place_fixed(now, spec, state_index)
  local window = spec.window
  if not window then
    return place_in_calendar(now, spec.bounds, state_index)
  end
  local index, into, age = place(now, window, state_index)
  return index, into, age, window
end

function fixed_window.read(raw)
  return whole_number(raw)
end

function fixed_window.spend(state, spec, now, cost)
  local limit, window = spec.limit, spec.window
  -- Fast path for nearly every call: the hits fit, and the state is of the current window. (This saves a third of the
  -- cost of a limit in Redis.)
  if window and state and cost > 0 then
    place_spec(spec, now)
    local index = spec.index
    if state % 65536 == index then
      local left = limit - cost - (state - index) / 65536
      if left >= 0 then
        return state + cost * 65536, left, 0, spec.reset
      end
    end
  end

  local state_index = state and state % 65536
  local index, into, age, length = place_fixed(now, spec, state_index)
  local count = age == 0 and (state - state_index) / 65536 or 0
  local reset = length - into

  if cost < 0 then -- a refund is never denied, and never exceeds an unused window
    if count == 0 then
      return state, limit, 0, reset
    end
    count = count + cost > 0 and count + cost or 0
    return count * 65536 + index, limit - count, 0, reset
  end

  local need = needed(cost, spec)
  local retry = 0
  if count + need > limit then
    retry = need > limit and -1 or reset
    if not spec.always then
      return state, limit - count, retry, reset
    end
  end
  if cost == 0 then
    return state, limit - count, retry, reset
  end
  count = count + cost < MAX_HITS and count + cost or MAX_HITS
  return count * 65536 + index, limit - count, retry, reset
end

-- Charges of a window that has ended are not refunded.
function fixed_window.give_back(state, spec, now, hits, charged_at)
  local _, into = place_fixed(now, spec)
  if charged_at > now or charged_at < now - into then
    return state
  end
  return (fixed_window.spend(state, spec, now, -hits))
end

-- Within its window a state only grows or shrinks by hits, and keeps its TTL.
function fixed_window.write(key, state, before, spec, now, jitter_ms)
  local state_index = state % 65536
  if before and before % 65536 == state_index then
    local difference = state - before
    redis.call("INCRBY", key, difference == spec.increment and spec.increment_text or format("%d", difference))
    return
  end
  local _, into, _, window = place_fixed(now, spec, state_index)
  redis.call("SET", key, format("%d", state), "PX", ttl_ms(window - into, jitter_ms))
end

algorithms.fixed_window = fixed_window
