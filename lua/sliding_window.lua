--[[
sliding_window.lua — at most `limit` hits in the last `window`, estimated from two counters.

The sliding window overlaps two fixed ones. Hits of the earlier one are assumed to be spread evenly, so they count in
proportion to the overlap:

        previous            current
  |------------------|------------------|
            [~~~~~~~~|======|           used = current + previous * (window - into) / window
                            now

State      text "index current previous": the index of the current window modulo 2^16, and the two counts
Bounds     counts <= 2^36
Retry      the first microsecond at which the formula admits the cost; a cost above the limit is never admitted
Reset      when both windows are outside of the sliding window
Cost       O(1)
]]
local sliding_window = {}

function sliding_window.read(raw)
  if not raw then
    return nil
  end
  local index, current, previous = match(raw, "^(%d+) (%d+) (%d+)$")
  if not index then
    return unknown_form
  end
  return { index = index + 0, current = current + 0, previous = previous + 0 }
end

-- The part of `previous` that still counts, rounded up: a hit counts until all of it is outside of the window.
local function weighted(previous, window, into)
  if previous == 0 then
    return 0
  end
  local whole, rest = mul_div(previous, into > 0 and window - into or window, window)
  return rest > 0 and whole + 1 or whole
end

-- The time into a window from which at most `room` of `previous` still counts.
local function slid_to(previous, room, window)
  if previous <= room then
    return 0
  end
  return window - mul_div(room, window, previous)
end

function sliding_window.spend(state, spec, now, cost)
  local window, limit = spec.window, spec.limit
  local index, into, age = place(now, window, state and state.index)
  local current, previous = 0, 0
  if age == 0 then
    current, previous = state.current, state.previous
  elseif age == 1 then
    previous = state.current
  end
  local spent, allowed, retry = current, true, 0

  if cost < 0 then
    -- Newest first: the latest charge is the most likely one to be refunded.
    spent = current + cost > 0 and current + cost or 0
    local rest = -cost - (current - spent)
    previous = previous - rest > 0 and previous - rest or 0
  else
    local need = needed(cost, spec)
    local over = current + weighted(previous, window, into) + need > limit
    allowed = not over or spec.always
    if allowed then
      spent = current + cost < MAX_HITS and current + cost or MAX_HITS
    end
    if not over then
      retry = 0
    elseif need > limit then
      retry = -1
    elseif spent + need <= limit then
      retry = slid_to(previous, limit - need - spent, window) - into
    else
      retry = window + slid_to(spent, limit - need, window) - into
    end
  end

  local reset = 0
  if spent > 0 then
    reset = 2 * window - into
  elseif previous > 0 then
    reset = window - into
  end
  local left = limit - spent - weighted(previous, window, into)
  if not allowed or cost == 0 or (cost < 0 and not state) then
    return state, left, retry, reset
  end
  return { index = index, current = spent, previous = previous }, left, retry, reset
end

-- Charges of a window that has ended are not refunded.
function sliding_window.give_back(state, spec, now, hits, charged_at)
  local _, into = place(now, spec.window)
  if charged_at > now or charged_at < now - into then
    return state
  end
  return (sliding_window.spend(state, spec, now, -hits))
end

function sliding_window.write(key, state, _, spec, now, jitter_ms)
  local _, into = place(now, spec.window, state.index)
  local text = format("%d %d %d", state.index, state.current, state.previous)
  redis.call("SET", key, text, "PX", ttl_ms(2 * spec.window - into, jitter_ms))
end

algorithms.sliding_window = sliding_window
