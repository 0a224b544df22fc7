--[[
decide.lua — decides a batch of calls, in order, each with all of its limits in one step.

Guarantee  the limits of a call are checked and charged together: no two calls can both take the last hit, and a denied
           call does not change limits with `charge: admitted`. Every string state is read once and written at most once
           per batch, however many calls use it (sliding_log uses a list, and more commands). A limit that occurs twice
           in one call sees its own first charge.

KEYS[n]    the distinct states of the batch
ARGV[1]    now_us          "" = this server's clock; tests pass a number
ARGV[2]    jitter_ms       added to every TTL
ARGV[3]    calls           big-endian 16-bit numbers: for each call (steps, flags), then for each of its steps
                           (index into KEYS, index into the specs), both from 0
             flags         +1 a quota without a limit passes; +2 shadow: the verdict is reported but not enforced.
                           Each of the following adds a number between flags and steps, in this order:
                           +4 how many microseconds the caller can wait (32 bits);
                           +8 refund: the time of the charge (64 bits). A refund is never denied, and charges of windows
                           that have ended are not refunded;
                           +16 idempotent call: the index into KEYS (16 bits) of its record, and the lifetime of the
                           record in seconds (16 bits). If the record exists, the recorded result is returned again.
                           With +8 the record is deleted;
                           +32 hits (32 bits), which replace the cost of each step: to refund, with +8; otherwise the
                           call takes as many of them as every step has left, and returns that number as the verdict
ARGV[4..]  specs           six each: algorithm, limit, window_us, burst, cost, flags
             window_us     or, for calendar windows, three times: "start next after" (lib/place_in_calendar.lua)
             cost          hits to charge; 0: look; negative: refund
             flags         +1 charge always, +2 shadow_mode, +4 quota_mode, +8 same descriptor as the previous step;
                           +16 for each microsecond that the step may wait for its slot (throttle; never with +1)
           A watcher (penalty.lua, warning.lua) is a step after the limits of its descriptor; it defines its own
           meaning of these numbers.
Returns    { now_us, then for each call: denied 0|1, and for each of its steps: left, retry_us, reset_us }
             denied        +2 if the result is from the record of an idempotent call, and nothing was charged now
             left          hits that still fit after this call; negative: debt
             retry_us      0: allowed; > 0: denied, and this step is admitted after exactly this long if no other call
                           intervenes; -1: never; < -1: charged now for a slot in -1 - retry_us microseconds
             reset_us      until the limit is as if unused (fixed_window: until its window ends)
Cost       O(steps); for sliding_log see there
]]
local byte = string.byte

local function number32(text, at)
  local byte1, byte2, byte3, byte4 = byte(text, at, at + 3)
  return ((byte1 * 256 + byte2) * 256 + byte3) * 256 + byte4
end

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call("TIME")
  now = time[1] * 1000000 + time[2]
end
local jitter_ms = tonumber(ARGV[2])
local calls = ARGV[3]

local specs = {}
for i = 4, #ARGV, 6 do
  specs[#specs + 1] = read_spec(algorithms, ARGV, i)
end

-- By index into KEYS: the stored text; the state that was read from it, the state after the calls so far, and the spec
-- whose algorithm writes it.
local stored = redis.call("MGET", unpack(KEYS))
local original, state, owner = {}, {}, {}

-- Keys and previous states of the current call, to undo its charges if it is denied.
local undo_key, undo_state = {}, {}

-- Outcome of the limits of the current descriptor, for its watchers:
--   denied    whether one of them denies
--   retry     the longest retry time; -1 if one of them never admits; 0: allowed, or denied only for a short deadline
--   holds     whether denials are enforced; false in the global shadow mode
--   admitted  whether the call passes
--   usage     thousandths used of the most used limit
--   lowest    the same just before the call, or after it if it was a refund
--   reset     until all of them are as if unused
local outcome = {}

-- By index into KEYS: records of idempotent calls of this batch, and their lifetime in seconds; false: delete.
local recorded, recorded_s = {}, {}

-- By index into the reply: whether a limit denies only because the caller cannot wait as long as the rules allow.
local denied_by_deadline = {}

local reply = { now }

-- The state of a step after the previous calls.
local function state_before(key_index, spec)
  if not owner[key_index] then
    local before = spec.algorithm.read(stored[key_index], KEYS[key_index], spec, now)
    original[key_index], state[key_index], owner[key_index] = before, before, spec
  end
  return state[key_index]
end

-- The number of hits, up to `hits`, that all steps have left.
local function hits_left(first, steps, hits)
  for at = first, first + 4 * (steps - 1), 4 do
    local key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
    local spec = specs[spec_high * 256 + spec_low + 1]
    local _, left = spec.algorithm.spend(state_before(key_high * 256 + key_low + 1, spec), spec, now, 0)
    hits = left < hits and left or hits
  end
  return hits > 0 and hits or 0
end

-- Replies with the recorded result, if there is one for such a call; returns whether there is.
local function reply_from_record(record, replied, steps, hits)
  local text = recorded[record]
  if text == nil then
    text = stored[record]
  end
  local numbers = {}
  for number in string.gmatch(text or "", "%-?%d+") do
    numbers[#numbers + 1] = tonumber(number)
  end
  if #numbers ~= 2 + 3 * steps then -- no record, or one of other rules
    return false
  end
  local elapsed = now - numbers[1]
  table.remove(numbers, 1)
  for i = 1, #numbers do
    reply[replied + i] = numbers[i]
    if i % 3 == 0 and numbers[i] < -1 then -- reduce the delay by the time elapsed
      local wait = -1 - numbers[i] - elapsed
      reply[replied + i] = wait > 0 and -1 - wait or 0
    end
  end
  if not hits then -- otherwise this is a number of hits
    reply[replied + 1] = numbers[1] + 2
  end
  return true
end

local function record_result(record, replied, steps, seconds)
  local words = { string.format("%.0f", now) }
  for i = 1, 1 + 3 * steps do
    words[i + 1] = string.format("%.0f", reply[replied + i])
  end
  recorded[record], recorded_s[record] = table.concat(words, " "), seconds
end

-- Decides the call whose steps begin at `first`, and appends the result to the reply, which has `replied` values.
-- Returns whether the result must be recorded: a denial without charges is not recorded but decided again on a retry.
local function decide_call(first, replied, steps, quota_passes, shadowed, max_wait, charged_at, hits)
  local at, key_high, key_low, spec_high, spec_low
  local verdict_at, granted = replied + 1, nil
  if hits and not charged_at then
    hits = hits_left(first, steps, hits)
    granted = hits
  end
  local failed_limits, quotas, failed_quotas, undoable, has_watchers = 0, quota_passes and 1 or 0, 0, false, false
  local charged_anyway = false
  local quota_failed -- whether the current descriptor has failed as a quota, which counts once for all of its limits
  replied = verdict_at

  at = first
  for step = 1, steps do
    key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
    at = at + 4
    local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
    local algorithm = spec.algorithm
    local before = owner[key_index] and state[key_index] or state_before(key_index, spec)
    local cost = granted or spec.cost
    if charged_at then
      before = algorithm.give_back(before, spec, now, hits or -cost, charged_at)
      cost = 0
    end
    local after, left, retry, reset = algorithm.spend(before, spec, now, cost)
    if charged_at then
      retry = 0
    end
    local max_delay = spec.delay < max_wait and spec.delay or max_wait
    if retry > max_delay then
      denied_by_deadline[replied] = retry <= spec.delay
      retry = retry - max_delay -- it is admitted as soon as its slot is within `max_delay`, and then delayed
    elseif retry > 0 then
      if cost > 0 then -- charge it as debt, so that the next call gets a later slot
        local wait = retry
        spec.always = true
        after, left, retry, reset = algorithm.spend(before, spec, now, cost)
        spec.always = false
        retry = -1 - wait
      else
        retry = 0
      end
    end
    undo_key[step], undo_state[step] = key_index, before
    state[key_index] = after
    reply[replied + 1], reply[replied + 2], reply[replied + 3] = left, retry, reset
    replied = replied + 3
    if algorithm.settle then
      has_watchers = true
    elseif not spec.always then
      undoable = true
    elseif cost ~= 0 then
      charged_anyway = true
    end
    if spec.quota and not spec.joined then
      quotas = quotas + 1
      quota_failed = false
    end
    if retry ~= 0 and retry >= -1 and not spec.shadow then
      if spec.quota then
        failed_quotas = failed_quotas + (quota_failed and 0 or 1)
        quota_failed = true
      else
        failed_limits = failed_limits + 1
      end
    end
  end

  local denied = failed_limits > 0 or (quotas > 0 and failed_quotas == quotas)
  reply[verdict_at] = granted or (denied and 1 or 0)

  if denied and not shadowed and undoable then
    for step = steps, 1, -1 do
      state[undo_key[step]] = undo_state[step]
    end
    -- Repeat from the state before the call: charge `always`, only read the others.
    local reply_at = verdict_at
    at = first
    for _ = 1, steps do
      key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
      at = at + 4
      local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
      if spec.always then
        local after, left, retry, reset = spec.algorithm.spend(state[key_index], spec, now, spec.cost)
        state[key_index] = after
        -- If it denied because of charges that are now undone, it still denies: a denied call must have a denying limit.
        reply[reply_at + 1], reply[reply_at + 3] = left, reset
        reply[reply_at + 2] = retry ~= 0 and retry or reply[reply_at + 2]
      else
        local after, left, _, reset = spec.algorithm.spend(state[key_index], spec, now, 0)
        state[key_index] = after
        local retry = reply[reply_at + 2]
        if retry == 0 or retry < -1 then
          reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, 0, reset
        end
      end
      reply_at = reply_at + 3
    end
  end

  if has_watchers then
    outcome.holds, outcome.admitted = not shadowed, shadowed or not denied
    local reply_at = verdict_at
    at = first
    for _ = 1, steps do
      key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
      at = at + 4
      local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
      local left, retry, reset = reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3]
      if not spec.joined then
        outcome.denied, outcome.retry, outcome.usage, outcome.lowest, outcome.reset = false, 0, 0, 0, 0
      end
      if spec.algorithm.settle then
        state[key_index], left, retry, reset = spec.algorithm.settle(state[key_index], spec, now, outcome)
        reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, retry, reset
      else
        local capacity = spec.burst > 0 and spec.burst or spec.limit
        local charged = spec.always or (outcome.admitted and (retry == 0 or retry < -1))
        local used, charged_hits = capacity - left, charged and spec.cost > 0 and spec.cost or 0
        local usage, lowest = used * 1000 / capacity, (used - charged_hits) * 1000 / capacity
        outcome.usage = usage > outcome.usage and usage or outcome.usage
        outcome.lowest = lowest > outcome.lowest and lowest or outcome.lowest
        outcome.reset = reset > outcome.reset and reset or outcome.reset
      end
      if retry > 0 or retry == -1 then -- a delay is not a denial
        outcome.denied = true
        -- Never (-1) is longer than any wait.
        local is_longest = retry == -1 or (retry > outcome.retry and outcome.retry ~= -1)
        if is_longest and not denied_by_deadline[reply_at] then
          outcome.retry = retry
        end
      end
      reply_at = reply_at + 3
    end
  end
  return charged_anyway or shadowed or not denied
end

local at, size, replied = 1, #calls, 1
while at < size do
  local steps_high, steps_low, _, flags = byte(calls, at, at + 3)
  local steps, quota_passes, shadowed = steps_high * 256 + steps_low, flags % 2 >= 1, flags % 4 >= 2
  local max_wait, charged_at, record, seconds, hits = math.huge, nil, nil, nil, nil
  at = at + 4
  if flags >= 4 then
    if flags % 8 >= 4 then
      max_wait = number32(calls, at)
      at = at + 4
    end
    if flags % 16 >= 8 then
      charged_at = number32(calls, at) * 4294967296 + number32(calls, at + 4)
      at = at + 8
    end
    if flags % 32 >= 16 then
      local record_high, record_low, seconds_high, seconds_low = byte(calls, at, at + 3)
      record, seconds = record_high * 256 + record_low + 1, seconds_high * 256 + seconds_low
      at = at + 4
    end
    if flags >= 32 then
      hits = number32(calls, at)
      at = at + 4
    end
  end
  if record and charged_at then
    recorded[record] = false
    record = nil
  end
  if not record or not reply_from_record(record, replied, steps, hits) then
    local must_record = decide_call(at, replied, steps, quota_passes, shadowed, max_wait, charged_at, hits)
    if record and must_record then
      record_result(record, replied, steps, seconds)
    end
  end
  at, replied = at + 4 * steps, replied + 1 + 3 * steps
end

-- Records are written last: if a write fails, a call that may not have been counted must not be replayed as counted.
for key_index = 1, #KEYS do
  local before, after = original[key_index], state[key_index]
  if after ~= before then
    local spec = owner[key_index]
    spec.algorithm.write(KEYS[key_index], after, before, spec, now, jitter_ms)
  end
end
for key_index, text in pairs(recorded) do
  if text then
    redis.call("SET", KEYS[key_index], text, "PX", recorded_s[key_index] * 1000)
  else
    redis.call("DEL", KEYS[key_index])
  end
end

return reply
