--[[
gcra.lua — generic cell rate algorithm: hits spaced evenly, `limit` per `window`, of which `burst` may come early.

Every hit advances the theoretical arrival time (TAT) by window / limit. A hit is admitted if the TAT is then at most
`burst` such intervals after now.

State      text "tat" or "tat part": the TAT is tat + part / limit microseconds; absent or past = unused
Bounds     the TAT is at most 2^51 microseconds ahead
Retry      the first microsecond at which the TAT would be near enough; a cost above the burst is never admitted
Reset      when the TAT is reached
Cost       O(1)
]]
local gcra = {}

function gcra.read(raw)
  if not raw then
    return nil
  end
  local tat, part = match(raw, "^(%d+) ?(%d*)$")
  if not tat or tat + 0 > MAX_TIME_US then
    return unknown_form
  end
  return { tat = tat + 0, part = part == "" and 0 or part + 0 }
end

-- floor(time * limit / window): the number of whole intervals in us + part / limit; negative if us is.
local function whole_intervals(us, part, spec)
  local window, limit = spec.window, spec.limit
  if us >= 0 then
    local whole, rest = mul_div(us, limit, window)
    return whole + floor((rest + part) / window)
  end
  local whole, rest = mul_div(-us, limit, window)
  return floor((part - rest) / window) - whole
end

function gcra.spend(state, spec, now, cost)
  local window, limit = spec.window, spec.limit
  local tat, part = now, 0
  if state and state.tat >= now then
    tat, part = state.tat, state.part
    if part >= limit then -- written with a larger limit
      part = limit - 1
    end
  end
  local far, far_part = mul_div(spec.burst, window, limit) -- how far ahead the TAT may be

  local need = cost == 0 and needed(cost, spec) or cost
  local over, long, long_part = false, 0, 0
  if cost >= 0 then
    long, long_part = mul_div(need, window, limit)
    -- By how much the TAT would be too far ahead. Rounding is harmless: near zero the product is small and exact.
    over = (tat + long - far - now) * limit + part + long_part - far_part > 0
  end
  local allowed = not over or spec.always
  if allowed and cost ~= 0 then
    local taken, taken_part = long, long_part
    if cost < 0 then
      taken, taken_part = mul_div(-cost, window, limit)
      taken, taken_part = -taken, -taken_part
    end
    tat, part = tat + taken, part + taken_part
    if part >= limit then
      tat, part = tat + 1, part - limit
    elseif part < 0 then
      tat, part = tat - 1, part + limit
    end
    if tat < now then
      tat, part = now, 0
    elseif tat - now > MAX_WAIT_US then
      tat, part = now + MAX_WAIT_US, 0
    end
  end

  local room, room_part = now + far - tat, far_part - part
  if room_part < 0 then
    room, room_part = room - 1, room_part + limit
  end
  local left = whole_intervals(room, room_part, spec)
  local reset = tat - now + (part > 0 and 1 or 0)
  local retry = 0
  if over then
    local late, late_part = tat + long - far - now, part + long_part - far_part
    retry = need > spec.burst and -1 or late - floor(-late_part / limit)
  end
  if not allowed or cost == 0 or (cost < 0 and not state) then
    return state, left, retry, reset
  end
  return { tat = tat, part = part }, left, retry, reset
end

-- As in token_bucket: the time elapsed since the charge is not refunded, unless it was charged as debt.
function gcra.give_back(state, spec, now, hits, charged_at)
  if not state or state.tat < now then
    return state
  end
  local limit = spec.limit
  local taken, taken_part = mul_div(hits, spec.window, limit)
  if spec.delay == 0 and now > charged_at then
    taken = taken - (now - charged_at)
  end
  if taken < 0 then
    return state
  end
  local tat, part = state.tat - taken, (state.part < limit and state.part or limit - 1) - taken_part
  if part < 0 then
    tat, part = tat - 1, part + limit
  end
  if tat < now then
    tat, part = now, 0
  end
  return { tat = tat, part = part }
end

function gcra.write(key, state, _, _, now, jitter_ms)
  local text = format(state.part > 0 and "%d %d" or "%d", state.tat, state.part)
  redis.call("SET", key, text, "PX", ttl_ms(state.tat - now, jitter_ms))
end

algorithms.gcra = gcra
