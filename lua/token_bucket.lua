--[[
token_bucket.lua — a bucket of `burst` tokens that gains `limit` tokens per `window`, evenly; a hit takes one.

State      text "at tokens part full": at time `at` there were tokens + part / window, and the bucket would be full at
           time `full`; absent = full
Bounds     debt <= 2^36 tokens; a bucket fills within 2^51 microseconds (checked when rules load)
Retry      the first microsecond at which the bucket has the cost; a cost above the burst is never admitted
Reset      when the bucket is full again
Cost       O(1)

The fraction of a token is stored as an exact remainder, so the result does not depend on how often it is read.
]]
local token_bucket = {}

function token_bucket.read(raw)
  if not raw then
    return nil
  end
  local at, tokens, part, full = match(raw, "^(%d+) (%-?%d+) (%d+) (%d+)$")
  if not at or at + 0 > MAX_TIME_US or full + 0 > MAX_TIME_US then
    return unknown_form
  end
  return { at = at + 0, tokens = tokens + 0, part = part + 0, full = full + 0 }
end

-- Microseconds until short * window - part units of 1 / window have been added, rounded up.
local function refill_us(short, part, spec)
  local whole, rest = mul_div(short, spec.window, spec.limit)
  local us = whole - floor((part - rest) / spec.limit)
  return us < MAX_WAIT_US and us or MAX_WAIT_US
end

-- The tokens now, or at the time of the state if the clock was set back: none are added until it has caught up.
local function level_at(state, spec, now)
  local window, burst = spec.window, spec.burst
  local at = state.at > now and state.at or now
  local gained, rest = mul_div(at - state.at, spec.limit, window)
  local tokens, part = state.tokens + gained, state.part + rest
  if part >= window then
    tokens, part = tokens + 1, part - window
  end
  if tokens >= burst then
    return at, burst, 0
  end
  return at, tokens, part
end

function token_bucket.spend(state, spec, now, cost)
  local burst = spec.burst
  local at, tokens, part = now, burst, 0
  if state then
    at, tokens, part = level_at(state, spec, now)
  end

  local need = cost == 0 and needed(cost, spec) or cost
  local over = tokens < need and cost >= 0
  local allowed = not over or spec.always
  if allowed then
    tokens = tokens - cost
    if tokens >= burst then
      tokens, part = burst, 0
    elseif tokens < -MAX_HITS then
      tokens = -MAX_HITS
    end
  end

  local retry, reset = 0, 0
  if over then
    retry = need > burst and -1 or at - now + refill_us(need - tokens, part, spec)
  end
  if tokens < burst then
    reset = at - now + refill_us(burst - tokens, part, spec)
  end
  local full = now + reset
  if not state and cost <= 0 then
    return nil, tokens, retry, reset
  end
  -- A look or a denial changes nothing, unless the bucket fills more slowly than when the state was written (the limit
  -- was changed): then the state must be kept longer.
  if state and (not allowed or cost == 0) and full <= state.full then
    return state, tokens, retry, reset
  end
  return { at = at, tokens = tokens, part = part, full = full }, tokens, retry, reset
end

-- The bucket may have been full since the charge, and without the charge the tokens added since would have overflowed.
-- So these are not refunded, unless it was charged as debt (throttle), since then it has not been full.
function token_bucket.give_back(state, spec, now, hits, charged_at)
  if not state then
    return nil
  end
  local window, burst = spec.window, spec.burst
  local gained, rest = 0, 0
  if spec.delay == 0 and now > charged_at then
    gained, rest = mul_div(now - charged_at, spec.limit, window)
  end
  if gained >= hits then
    return state
  end
  local at, tokens, part = level_at(state, spec, now)
  tokens, part = tokens + hits - gained, part - rest
  if part < 0 then
    tokens, part = tokens - 1, part + window
  end
  if tokens >= burst then
    return { at = at, tokens = burst, part = 0, full = at }
  end
  return { at = at, tokens = tokens, part = part, full = at + refill_us(burst - tokens, part, spec) }
end

function token_bucket.write(key, state, _, _, now, jitter_ms)
  local text = format("%d %d %d %d", state.at, state.tokens, state.part, state.full)
  redis.call("SET", key, text, "PX", ttl_ms(state.full - now, jitter_ms))
end

algorithms.token_bucket = token_bucket
