--[[
calls.lua — decides calls one after the other, each with all of its limits together.

decide_calls(reply, first_call, replied)
  Decides the calls of the current run (states.lua) from `first_call` on, and appends their results to the reply, which has
  `replied` values so far. It writes nothing to Redis, so it can be called again. Returns whether decide_plain_steps has
  decided all of these calls.

A call is decided in up to three passes over its steps: `decide_call` spends each of its limits; if the call is denied,
`charge_denied` repeats it from the state before, without the charges that only admitted calls make; then its watchers
learn the outcome (watchers.lua).
]]

-- Keys and previous states of the current call, to undo its charges if it is denied. Entries of other calls may remain.
local undo_key, undo_state = {}, {}

local function undo(steps)
  for i = steps, 1, -1 do
    state[undo_key[i]] = undo_state[i]
  end
end

-- Replies that the state of a step has an unknown form; of step 0: the record.
local function reply_unknown(reply, verdict_at, steps, number)
  reply[verdict_at] = -1
  for i = verdict_at + 1, verdict_at + 3 * steps do
    reply[i] = 0
  end
  if number > 0 then
    reply[verdict_at + 3 * number - 2] = 1
  end
end

-- The number of hits, up to `hits`, that all steps have left; or nil, and which step's state has an unknown form.
local function hits_left(first, last, hits)
  for step = first, last do
    local spec = run.step_specs[step]
    local before = state_before(run.step_keys[step], spec)
    if before == unknown_form then
      return nil, step - first + 1
    end
    local _, left = spec.algorithm.spend(before, spec, now, 0)
    hits = left < hits and left or hits
  end
  return hits > 0 and hits or 0
end

-- Repeats a denied call from the state before it: charges limits with `charge: always`, and only reads the others.
local function charge_denied(reply, verdict_at, first, last)
  local reply_at = verdict_at
  for step = first, last do
    local key_index, spec = run.step_keys[step], run.step_specs[step]
    local cost = spec.always and spec.cost or 0
    local after, left, retry, reset = spec.algorithm.spend(state[key_index], spec, now, cost)
    state[key_index] = after
    local decided = reply[reply_at + 2]
    if spec.always then
      -- If it denied because of charges that are now undone, it still denies: a denied call must have a denying limit.
      reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, retry ~= 0 and retry or decided, reset
    elseif decided == 0 or decided < -1 then
      reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, 0, reset
    end
    reply_at = reply_at + 3
  end
end

-- Decides a call as decide_call does, but faster, if all of its limits are plain, have states of the current window, and
-- allow. Returns whether it has decided; if not, nothing is charged.
local function decide_plain_steps(reply, replied, first, last)
  local step_keys, step_specs, reply_at = run.step_keys, run.step_specs, replied + 1
  for step = first, last do
    local key_index, spec = step_keys[step], step_specs[step]
    local before = spec.is_plain and (state[key_index] or state_before(key_index, spec))
    if not before or before == unknown_form then
      undo(step - first)
      return false
    end
    place_spec(spec, now)
    local index = before % 65536
    local left = spec.limit - spec.cost - (before - index) / 65536
    if left < 0 or index ~= spec.index then
      undo(step - first)
      return false
    end
    undo_key[step - first + 1], undo_state[step - first + 1] = key_index, before
    state[key_index] = before + spec.increment
    reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, 0, spec.reset
    reply_at = reply_at + 3
  end
  reply[replied + 1] = 0
  return true
end

-- Decides the call of these steps with its options, and appends the result to the reply, which has `replied` values.
-- Returns whether the result must be recorded: a denial without charges is not recorded but decided again on a retry.
local function decide_call(reply, replied, first, last, options)
  local max_wait, charged_at, hits = options.max_wait, options.charged_at, options.hits
  local verdict_at, granted = replied + 1, nil
  if hits and not charged_at then
    local unknown
    granted, unknown = hits_left(first, last, hits)
    if not granted then
      reply_unknown(reply, verdict_at, last - first + 1, unknown)
      return false
    end
  end
  local failed_limits, quotas, failed_quotas = 0, options.quota_passes and 1 or 0, 0
  local undoable, has_watchers, charged_anyway = false, false, false
  local quota_failed -- whether the current descriptor has failed as a quota, which counts once for all of its limits
  replied = verdict_at

  for step = first, last do
    local key_index, spec = run.step_keys[step], run.step_specs[step]
    local algorithm = spec.algorithm
    local before = owner[key_index] and state[key_index] or state_before(key_index, spec)
    if before == unknown_form then
      undo(step - first)
      reply_unknown(reply, verdict_at, last - first + 1, step - first + 1)
      return false
    end
    local cost = granted or spec.cost
    undo_key[step - first + 1], undo_state[step - first + 1] = key_index, before
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
        if cost > 0 then -- so that the next call gets a later slot
          local wait = retry
          after, left, retry, reset = algorithm.spend(before, spec.as_debt, now, cost)
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
  local admitted = options.shadowed or not denied
  reply[verdict_at] = granted or (denied and 1 or 0)

  if not admitted and undoable then
    undo(last - first + 1)
    charge_denied(reply, verdict_at, first, last)
  end
  if has_watchers then
    settle_watchers(reply, verdict_at, first, last, admitted, not options.shadowed)
  end
  return charged_anyway or admitted
end

-- Options of calls without flags.
local no_options = { max_wait = math.huge }

-- Decides a call, or replies with the result that is recorded for it.
local function decide_or_repeat(reply, replied, first, last, options)
  local record, steps = options.record, last - first + 1
  if not record then
    decide_call(reply, replied, first, last, options)
  elseif is_unreadable(record) then
    reply_unknown(reply, replied + 1, steps, 0)
  elseif options.charged_at then
    forget_record(record)
    decide_call(reply, replied, first, last, options)
  elseif not reply_from_record(reply, replied, record, steps, options.hits) then
    if decide_call(reply, replied, first, last, options) then
      record_result(reply, replied, record, steps, options.record_s)
    end
  end
end

local function decide_calls(reply, first_call, replied)
  if next(denied_by_deadline) then
    denied_by_deadline = {}
  end
  local ends, all_options = run.ends, run.options
  local first, are_plain = first_call > 1 and ends[first_call - 1] + 1 or 1, true
  for call = first_call, run.calls do
    local last, options = ends[call], all_options[call]
    if options or not decide_plain_steps(reply, replied, first, last) then
      decide_or_repeat(reply, replied, first, last, options or no_options)
      are_plain = false
    end
    first, replied = last + 1, replied + 1 + 3 * (last - first + 1)
  end
  return are_plain
end
