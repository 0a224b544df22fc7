--[[
decide.lua — decides a batch of calls, in order, each with all of its limits in one step.

decide(KEYS, ARGV) -> reply

Guarantee  the limits of a call are checked and charged together: no two calls can both take the last hit, and a denied
           call does not change limits with `charge: admitted`. Every state is read before the first one is written, so a
           run that cannot read a key changes nothing. A limit that occurs twice in one call sees its own first charge.
           A state of an unknown form is never overwritten: its call is not decided.

KEYS       the distinct states of the batch; of several slots only the first one (see `groups`)
ARGV[1]    now_us          "" = this server's clock; tests pass a number
ARGV[2]    jitter_ms       added to every TTL: a number from 0 to this one, exclusive
ARGV[3]    calls           big-endian 16-bit numbers: the number of groups, and the size of each (see `groups`); then for
                           each call (steps, flags), then for each of its steps (index of the key, index of the spec),
                           both from 0
             groups        0: KEYS are all keys. Otherwise the keys belong to several slots of this server: only the first
                           one is in KEYS and the others follow in ARGV[4..], those of one slot together as a group
             flags         +1 a quota without a limit passes; +2 shadow: the verdict is reported but not enforced.
                           Each of the following adds a number between flags and steps, in this order:
                           +4 how many microseconds the caller can wait (32 bits);
                           +8 refund: the time of the charge (64 bits). A refund is never denied, and charges of windows
                           that have ended are not refunded;
                           +16 idempotent call: the index of the key (16 bits) of its record, and the lifetime of the
                           record in seconds (16 bits). If the record exists, the recorded result is returned again.
                           With +8 the record is deleted;
                           +32 hits (32 bits), which replace the cost of each step: to refund, with +8; otherwise the
                           call takes as many of them as every step has left, and returns that number as the verdict
ARGV[n..]  specs           one text each: "algorithm|limit|window_us|burst|cost|flags"
             window_us     or, for calendar windows, three times: "start next after" (lib/place_in_calendar.lua)
             cost          hits to charge; 0: look; negative: refund
             flags         +1 charge always, +2 shadow_mode, +4 quota_mode, +8 same descriptor as the previous step;
                           +16 for each microsecond that the step may wait for its slot (throttle; never with +1)
           A watcher (penalty.lua, warning.lua) is a step after the limits of its descriptor; it defines its own
           meaning of these numbers.
Returns    { now_us, then for each call: verdict, and for each of its steps: left, retry_us, reset_us }
             verdict       0 allowed, 1 denied; +2 if the result is from the record of an idempotent call, and nothing was
                           charged now. -1: one of its states has an unknown form, nothing was charged; `left` of that
                           step is 1, all other numbers are 0
             left          hits that still fit after this call; negative: debt
             retry_us      0: allowed; > 0: denied, and this step is admitted after exactly this long if no other call
                           intervenes; -1: never; < -1: charged now for a slot in -1 - retry_us microseconds
             reset_us      until the limit is as if unused (fixed_window: until its window ends)
Cost       O(steps); for sliding_log see there. Nearly every call takes a short path (short_paths.lua)
]]

-- Of the current run: the time, what is added to TTLs, and the arguments. Assigned by `decide`.
local now, jitter_ms, calls, keys
local specs = {}

-- By index of the key: the stored text; the state that was read from it, the state after the calls so far, and the spec
-- whose algorithm writes it. Tables that every run needs are kept and cleared, because filling a new one costs several
-- times as much as using it.
local stored
local original, state, owner = {}, {}, {}
local key_count = 0 -- of the run that they are of

-- Keys and previous states of the current call, to undo its charges if it is denied. Entries of other calls may remain.
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

-- By index of the key: records of idempotent calls of this batch, and their lifetime in seconds; false: delete.
local recorded, recorded_s = {}, {}

-- By index into the reply: whether a limit denies only because the caller cannot wait as long as the rules allow.
local denied_by_deadline = {}

-- By index of the key: true if it has a string, none of which was stored.
local is_new = {}

local reply

-- The state of a step after the previous calls; `unknown_form` if it cannot be read.
local function state_before(key_index, spec)
  if not owner[key_index] then
    local text, algorithm = stored[key_index], spec.algorithm
    local before = text
    if text ~= unknown_form then
      before = algorithm.read(text, keys[key_index], spec, now)
      is_new[key_index] = not text and not algorithm.is_list or nil
    end
    original[key_index], state[key_index], owner[key_index] = before, before, spec
  end
  return state[key_index]
end

-- Replies that the state of a step has an unknown form; of step 0: the record.
local function reply_unknown(verdict_at, steps, step)
  reply[verdict_at] = -1
  for i = verdict_at + 1, verdict_at + 3 * steps do
    reply[i] = 0
  end
  if step > 0 then
    reply[verdict_at + 3 * step - 2] = 1
  end
end

-- The number of hits, up to `hits`, that all steps have left; or nil, and the step whose state has an unknown form.
local function hits_left(first, steps, hits)
  for step = 1, steps do
    local at = first + 4 * (step - 1)
    local key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
    local spec = specs[spec_high * 256 + spec_low + 1]
    local before = state_before(key_high * 256 + key_low + 1, spec)
    if before == unknown_form then
      return nil, step
    end
    local _, left = spec.algorithm.spend(before, spec, now, 0)
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
  local words = { format("%d", now) }
  for i = 1, 1 + 3 * steps do
    words[i + 1] = format("%d", reply[replied + i])
  end
  recorded[record], recorded_s[record] = table.concat(words, " "), seconds
end

local function undo(steps)
  for step = steps, 1, -1 do
    state[undo_key[step]] = undo_state[step]
  end
end

-- Repeats a denied call from the state before it: charges limits with `charge: always`, and only reads the others.
local function charge_denied(first, verdict_at, steps)
  local reply_at, at = verdict_at, first
  for _ = 1, steps do
    local key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
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

-- Passes the outcome of each descriptor's limits to its watchers.
local function settle_watchers(first, verdict_at, steps)
  local reply_at, at = verdict_at, first
  for _ = 1, steps do
    local key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
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

-- Decides a call as decide_call does, if it passes and has only limits that are fixed windows with a state of the current
-- window; nearly every call does. Returns whether it has decided; if not, nothing is charged.
local function decide_plain_steps(first, replied, steps)
  local at, reply_at = first, replied + 1
  for step = 1, steps do
    local key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
    local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
    local before = spec.is_plain and (state[key_index] or state_before(key_index, spec))
    if not before or before == unknown_form then
      undo(step - 1)
      return false
    end
    place_spec(spec, now)
    local index = before % 65536
    local left = spec.limit - spec.cost - (before - index) / 65536
    if left < 0 or index ~= spec.index then
      undo(step - 1)
      return false
    end
    undo_key[step], undo_state[step] = key_index, before
    state[key_index] = before + spec.increment
    reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, 0, spec.reset
    at, reply_at = at + 4, reply_at + 3
  end
  reply[replied + 1] = 0
  return true
end

-- Decides the call whose steps begin at `first`, and appends the result to the reply, which has `replied` values.
-- Returns whether the result must be recorded: a denial without charges is not recorded but decided again on a retry.
local function decide_call(first, replied, steps, quota_passes, shadowed, max_wait, charged_at, hits)
  local verdict_at, granted = replied + 1, nil
  if hits and not charged_at then
    local step
    granted, step = hits_left(first, steps, hits)
    if not granted then
      reply_unknown(verdict_at, steps, step)
      return false
    end
  end
  local failed_limits, quotas, failed_quotas, undoable, has_watchers = 0, quota_passes and 1 or 0, 0, false, false
  local charged_anyway = false
  local quota_failed -- whether the current descriptor has failed as a quota, which counts once for all of its limits
  replied = verdict_at

  local at = first
  for step = 1, steps do
    local key_high, key_low, spec_high, spec_low = byte(calls, at, at + 3)
    at = at + 4
    local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
    local algorithm = spec.algorithm
    local before = owner[key_index] and state[key_index] or state_before(key_index, spec)
    if before == unknown_form then
      undo(step - 1)
      reply_unknown(verdict_at, steps, step)
      return false
    end
    local cost = granted or spec.cost
    undo_key[step], undo_state[step] = key_index, before
    if charged_at then
      before = algorithm.give_back(before, spec, now, hits or -cost, charged_at)
      cost = 0
    end
    local after, left, retry, reset = algorithm.spend(before, spec, now, cost)
    if retry ~= 0 then
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
      if retry ~= 0 and retry >= -1 and not spec.shadow and not spec.quota then
        failed_limits = failed_limits + 1
      end
    end
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
    if spec.quota then
      if not spec.joined then
        quotas = quotas + 1
        quota_failed = false
      end
      if retry ~= 0 and retry >= -1 and not spec.shadow then
        failed_quotas = failed_quotas + (quota_failed and 0 or 1)
        quota_failed = true
      end
    end
  end

  local denied = failed_limits > 0 or (quotas > 0 and failed_quotas == quotas)
  reply[verdict_at] = granted or (denied and 1 or 0)

  if denied and not shadowed and undoable then
    undo(steps)
    charge_denied(first, verdict_at, steps)
  end
  if has_watchers then
    outcome.holds, outcome.admitted = not shadowed, shadowed or not denied
    settle_watchers(first, verdict_at, steps)
  end
  return charged_anyway or shadowed or not denied
end

-- Decides a call with any flags, whose options begin at `at`. Returns where its steps begin.
local function decide_any_call(at, replied, steps, flags)
  local quota_passes, shadowed = flags % 2 >= 1, flags % 4 >= 2
  local max_wait, charged_at, record, seconds, hits = math.huge, nil, nil, nil, nil
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
  local text = record and stored[record]
  if text and (text == unknown_form or find(text, "[^%d -]")) then
    reply_unknown(replied + 1, steps, 0)
  elseif record and charged_at then
    recorded[record] = false
    decide_call(at, replied, steps, quota_passes, shadowed, max_wait, charged_at, hits)
  elseif not record or not reply_from_record(record, replied, steps, hits) then
    local must_record = decide_call(at, replied, steps, quota_passes, shadowed, max_wait, charged_at, hits)
    if record and must_record then
      is_new[record] = not stored[record] or nil
      record_result(record, replied, steps, seconds)
    end
  end
  return at
end

-- Forgets the states, which may be large.
local function clear_states()
  for key_index = 1, key_count do
    original[key_index], state[key_index], owner[key_index] = nil, nil, nil
  end
  key_count = 0
end

-- Decides the calls from `at` on, and appends to the reply, which has `replied` values. It writes nothing.
local function decide_calls(at, replied)
  clear_states() -- of a run that failed, or that began again
  key_count = #keys
  if next(is_new) then
    is_new = {}
  end
  if next(recorded) then
    recorded, recorded_s = {}, {}
  end
  if next(denied_by_deadline) then
    denied_by_deadline = {}
  end
  local size = #calls
  while at < size do
    local steps_high, steps_low, _, flags = byte(calls, at, at + 3)
    local steps = steps_high * 256 + steps_low
    at = at + 4
    if flags ~= 0 or not decide_plain_steps(at, replied, steps) then
      at = decide_any_call(at, replied, steps, flags)
    end
    at, replied = at + 4 * steps, replied + 1 + 3 * steps
  end
end

-- Returns whether nothing is stored under the keys that are about to be written as new strings. Keys of another type
-- look like missing ones to MGET; they are marked as states of an unknown form.
local function are_new(groups)
  local marked, first = false, 1
  for _, size in ipairs(groups or { #keys }) do
    local names, indexes = {}, {}
    for key_index = first, first + size - 1 do
      if is_new[key_index] and (state[key_index] ~= original[key_index] or recorded[key_index]) then
        names[#names + 1], indexes[#names + 1] = keys[key_index], key_index
      end
    end
    if names[1] and redis.call("EXISTS", unpack(names)) > 0 then
      for i = 1, #names do
        if redis.call("EXISTS", names[i]) > 0 then
          stored[indexes[i]], marked = unknown_form, true
        end
      end
    end
    first = first + size
  end
  return not marked
end

-- Writes every state that has changed.
local function write_states()
  for key_index = 1, #keys do
    local before, after = original[key_index], state[key_index]
    if after ~= before then
      local spec = owner[key_index]
      spec.algorithm.write(keys[key_index], after, before, spec, now, jitter_ms)
    end
  end
  -- Last: if a write fails, a call that may not have been counted must not be replayed as counted.
  for key_index, text in pairs(recorded) do
    if text then
      redis.call("SET", keys[key_index], text, "PX", format("%d", recorded_s[key_index] * 1000))
    else
      redis.call("DEL", keys[key_index])
    end
  end
end

-- Where the calls begin, and the sizes of the groups of keys of one slot each; nil if there is one slot.
local function read_groups()
  local high, low = byte(calls, 1, 2)
  local count = high * 256 + low
  if count == 0 then
    return 3, nil
  end
  local groups = {}
  for group = 1, count do
    high, low = byte(calls, 1 + 2 * group, 2 + 2 * group)
    groups[group] = high * 256 + low
  end
  return 3 + 2 * count, groups
end

-- The stored texts of all keys, or the error. There is one command for each group, because it cannot span slots.
local function read_stored(groups)
  if not groups then
    local found = redis.pcall("MGET", unpack(keys))
    return not found.err and found, found
  end
  local texts, first = {}, 1
  for _, size in ipairs(groups) do
    local found = redis.pcall("MGET", unpack(keys, first, first + size - 1))
    if found.err then
      return nil, found
    end
    for i = 1, size do
      texts[first + i - 1] = found[i]
    end
    first = first + size
  end
  return texts
end

local function decide(KEYS, ARGV)
  now = tonumber(ARGV[1])
  if not now then
    local time = redis.call("TIME")
    now = time[1] * 1000000 + time[2]
  end
  calls, keys = ARGV[3], KEYS
  jitter_ms = ARGV[2] == "0" and 0 or jitter(now, ARGV[2])
  local at, groups = read_groups()
  local first_spec = 4
  if groups then
    keys = { KEYS[1] }
    for _, size in ipairs(groups) do
      first_spec = first_spec + size
    end
    first_spec = first_spec - 1
    for i = 4, first_spec - 1 do
      keys[i - 2] = ARGV[i]
    end
  end
  for i = first_spec, #ARGV do
    specs[i - first_spec + 1] = read_spec(algorithms, ARGV[i])
  end

  local is_lone = not keys[2] and #calls == at + 7 and byte(calls, at + 3) == 0 and specs[1].is_simple
  local next_at, replied = at, 1
  -- Reading a key once is cheaper if several calls use it.
  local has_prefix = 3 * #keys >= (#calls + 1 - at) / 4 and not (is_lone and not specs[1].is_plain)
  reply = { now }
  if has_prefix then
    next_at, replied = charge_windows(calls, at, keys, specs, now, reply)
    next_at, replied = next_at or at, replied or 1
    if next_at > #calls then
      begin_windows(now, jitter_ms)
      return reply
    end
  end
  if is_lone then
    local answer = spend_one(keys[1], specs[1], now, jitter_ms)
    if answer then
      return answer
    end
  end

  local failure
  stored, failure = read_stored(groups)
  if not stored then
    if has_prefix then
      undo_all()
    end
    return failure
  end
  if has_prefix then
    begin_windows(now, jitter_ms, stored)
  end
  decide_calls(next_at, replied)
  while next(is_new) and not are_new(groups) do
    decide_calls(next_at, replied)
  end
  write_states()
  clear_states()
  return reply
end
