--[[
penalty.lua — progressive penalties: the wait grows with repeated violations.

Violation  the first denial of a descriptor by its own limits after an admission, or after a cooldown. Not violations:
           denials during a cooldown, a denial that waiting cannot resolve (a cost above the limit), a denial only
           because of a short deadline (throttle), and looks.
Cooldown   started by a violation: the retry time of that denial, times the multiplier selected by the number of
           violations within the last `window`. Violation number `limit` (`after` in the rules) selects the first
           multiplier, the next one the second, and so on up to the last. From that number on the cooldown is also
           enforced: until it ends everything is denied, regardless of the limits. Below it only the limits deny.

Each call is processed twice. `spend` is called with the limits and denies during an enforced cooldown. `settle` is
called after the verdict and counts violations. A descriptor that is never denied has no state and causes no write.

State      text "until holds at at at …": the end of the last cooldown (0: a call was admitted since), whether it is
           enforced (1 or 0), and the times of the violations, oldest first; absent = no violation
Bounds     only times that can change the multiplier are kept: at most 1000 (checked when rules load). A cooldown is at
           most 2^51 microseconds
Left       number of violations within the period, including this call's
Retry      0, or until the end of the cooldown that denies this call or that this call has started
Reset      until the last violation has expired and the cooldown is over
Cost       O(number of times kept)
]]
local penalty = {}

function penalty.read(raw)
  if not raw then
    return nil
  end
  local until_us, holds, moments = match(raw, "^(%d+) ([01])( [%d ]*%d)$")
  if not until_us then
    return unknown_form
  end
  local state = { until_us = tonumber(until_us), holds = holds == "1" }
  for at in string.gmatch(moments, "%d+") do
    state[#state + 1] = tonumber(at)
  end
  return state
end

-- The index of the first violation that has not expired.
local function first_unexpired(state, spec, now)
  local first = 1
  while state[first] and state[first] <= now - spec.window do
    first = first + 1
  end
  return first
end

local function until_expired(state, spec, now)
  local last = state[#state] + spec.window
  last = last > state.until_us and last or state.until_us
  return last > now and last - now or 0
end

function penalty.spend(state, spec, now, cost)
  if not state then
    return nil, 0, 0, 0
  end
  local retry = 0
  if cost >= 0 and state.holds and now < state.until_us then
    retry = state.until_us - now
  end
  return state, #state - first_unexpired(state, spec, now) + 1, retry, until_expired(state, spec, now)
end

-- The state after a violation at `now` with retry time `retry`.
local function violated(state, spec, now, retry)
  local multipliers, highest = {}, 0
  for multiplier in string.gmatch(spec.burst, "%d+") do
    highest = highest + 1
    multipliers[highest] = tonumber(multiplier)
  end
  local max_violations = spec.limit + highest - 1
  local after = {}
  if state then
    local first = first_unexpired(state, spec, now)
    if #state - first + 2 > max_violations then
      first = #state + 2 - max_violations
    end
    for i = first, #state do
      after[#after + 1] = state[i]
    end
  end
  after[#after + 1] = now
  local number = #after - spec.limit + 1
  local cooldown = retry * (multipliers[number < 1 and 1 or number])
  after.until_us = now + (cooldown < MAX_WAIT_US and cooldown or MAX_WAIT_US)
  after.holds = number >= 1
  return after
end

-- outcome: that of the descriptor's own limits (watchers.lua).
function penalty.settle(state, spec, now, outcome)
  local _, violations, retry, reset = penalty.spend(state, spec, now, spec.cost)
  if spec.cost <= 0 or retry > 0 then
    return state, violations, retry, reset
  end
  local in_cooldown = state and now < state.until_us
  if outcome.retry > 0 and outcome.holds and not in_cooldown then
    local after = violated(state, spec, now, outcome.retry)
    return after, #after, after.holds and after.until_us - now or 0, until_expired(after, spec, now)
  end
  if in_cooldown and outcome.admitted then
    local after = { until_us = 0, holds = false, unpack(state) }
    return after, violations, 0, until_expired(after, spec, now)
  end
  return state, violations, 0, reset
end

function penalty.write(key, state, _, spec, now, jitter_ms)
  local words = { format("%d %d", state.until_us, state.holds and 1 or 0) }
  for i = 1, #state do
    words[i + 1] = format("%d", state[i])
  end
  redis.call("SET", key, table.concat(words, " "), "PX", ttl_ms(until_expired(state, spec, now), jitter_ms))
end

algorithms.penalty = penalty
