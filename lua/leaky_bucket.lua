--[[
leaky_bucket.lua — a bucket of size `burst` that leaks `limit` per `window`, evenly; a hit adds one.

State      text "at level part empty": at time `at` the level was level + part / window, and the bucket would be empty
           at time `empty`; absent = empty
Bounds     level <= 2^36; a full bucket drains within 2^51 microseconds (checked when rules load)
Retry      the first microsecond at which the cost fits without overflow; a cost above the burst never does
Reset      when the bucket is empty
Cost       O(1)

It admits the same calls as a token bucket of the same size: one counts what is used, the other what is left. They differ
when the burst is changed: the level stays, so a larger bucket has room at once and a smaller one must drain first.
]]
local leaky_bucket = {}

function leaky_bucket.read(raw)
  if not raw then
    return nil
  end
  local at, level, part, empty = match(raw, "^(%d+) (%d+) (%d+) (%d+)$")
  if not at or at + 0 > MAX_TIME_US or empty + 0 > MAX_TIME_US then
    return unknown_form
  end
  return { at = at + 0, level = level + 0, part = part + 0, empty = empty + 0 }
end

-- Microseconds until much * window + part units of 1 / window have leaked out, rounded up.
local function drain_us(much, part, spec)
  local whole, rest = mul_div(much, spec.window, spec.limit)
  local us = whole - floor(-(rest + part) / spec.limit)
  return us < MAX_WAIT_US and us or MAX_WAIT_US
end

-- The level now, or at the time of the state if the clock was set back: nothing leaks until it has caught up.
local function level_in(state, spec, now)
  local window = spec.window
  local at = state.at > now and state.at or now
  local leaked, rest = mul_div(at - state.at, spec.limit, window)
  local level, part = state.level - leaked, state.part - rest
  if part < 0 then
    level, part = level - 1, part + window
  end
  if level < 0 then
    return at, 0, 0
  end
  return at, level, part
end

function leaky_bucket.spend(state, spec, now, cost)
  local burst = spec.burst
  local at, level, part = now, 0, 0
  if state then
    at, level, part = level_in(state, spec, now)
  end
  local filled = part > 0 and level + 1 or level -- a partial unit occupies a whole one

  local need = cost == 0 and needed(cost, spec) or cost
  local over = filled + need > burst and cost >= 0
  local allowed = not over or spec.always
  if allowed then
    level = level + cost
    if level < 0 then
      level, part = 0, 0
    elseif level > MAX_HITS then
      level = MAX_HITS
    end
    filled = part > 0 and level + 1 or level
  end

  local retry, reset = 0, 0
  if over then
    retry = need > burst and -1 or at - now + drain_us(level + need - burst, part, spec)
  end
  if filled > 0 then
    reset = at - now + drain_us(level, part, spec)
  end
  local empty = now + reset
  if not state and cost <= 0 then
    return nil, burst - filled, retry, reset
  end
  -- As in token_bucket: an unchanged state is not written, unless the bucket now drains more slowly.
  if state and (not allowed or cost == 0) and empty <= state.empty then
    return state, burst - filled, retry, reset
  end
  return { at = at, level = level, part = part, empty = empty }, burst - filled, retry, reset
end

-- As in token_bucket: what has leaked out since the charge is not refunded, unless it was charged as debt.
function leaky_bucket.give_back(state, spec, now, hits, charged_at)
  if not state then
    return nil
  end
  local window = spec.window
  local leaked, rest = 0, 0
  if spec.delay == 0 and now > charged_at then
    leaked, rest = mul_div(now - charged_at, spec.limit, window)
  end
  if leaked >= hits then
    return state
  end
  local at, level, part = level_in(state, spec, now)
  level, part = level - hits + leaked, part + rest
  if part >= window then
    level, part = level + 1, part - window
  end
  if level < 0 then
    return { at = at, level = 0, part = 0, empty = at }
  end
  return { at = at, level = level, part = part, empty = at + drain_us(level, part, spec) }
end

function leaky_bucket.write(key, state, _, _, now, jitter_ms)
  local text = format("%d %d %d %d", state.at, state.level, state.part, state.empty)
  redis.call("SET", key, text, "PX", ttl_ms(state.empty - now, jitter_ms))
end

algorithms.leaky_bucket = leaky_bucket
