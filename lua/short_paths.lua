--[[
short_paths.lua — two ways to decide a call with fewer commands. Most calls take one; calls.lua decides the others.

charge_windows(run, keys, now) -> reply, calls
  Decides the calls whose limits are all plain (`run.plain`), from the first call on. It stops at a call that does not
  pass, or that only calls.lua can decide: because a state is of the future, or has an unknown form, or because its key
  has begun a window in this run. INCRBY charges a limit, and its result shows whether the state is of the current
  window: this takes one command, and calls.lua takes two. The charges of the call at which it stops are undone. Redis
  runs no other client's commands during a run, so no other client sees these charges.
  After an error of INCRBY the charges of all calls are undone: a key may be of another type or, on a cluster, on another
  server, and then the run must fail with nothing charged.
  Returns the short form of the reply (decide.lua), and how many calls are decided.

in_full(run, reply, calls) -> reply, length
  Converts a reply with the results of this many calls from the short form to the full form.
in_short(run, reply) -> reply
  Converts the reply to all calls from the full form to the short form.

write_begun_windows(run, keys, now, jitter_ms, stored)
  Writes the states of windows that these charges began, and updates `stored`, which was read after the charges.
undo_windows(run, keys)
  Undoes the charges of charge_windows. It is called before write_begun_windows, or not at all.

spend_one(key, spec, now, jitter_ms) -> reply
  Decides a run of a single call with a single limit whose state is a Redis string (`run.lone`). Returns nil if the state
  cannot be read, or has an unknown form.
]]

-- The charges of this run: by step, the result of INCRBY; the steps whose charge began a window; and the set of their keys,
-- nil if there are none.
local results, charged_count = {}, 0
local begun, begun_count, begun_keys = {}, 0, nil

local function undo_charges(run, keys, first)
  for step = charged_count, first, -1 do
    local key, spec = keys[run.step_keys[step]], run.step_specs[step]
    if results[step] == spec.increment then -- before the charge the key was missing, or its state was 0
      redis.call("DEL", key)
    else
      redis.call("INCRBY", key, format("%d", -spec.increment))
    end
  end
  charged_count = first - 1
  while begun_count > 0 and begun[begun_count] > charged_count do
    begun_count = begun_count - 1
  end
end

local function undo_windows(run, keys)
  undo_charges(run, keys, 1)
end

-- Judges a charge of a state that is not of the current window. If the charge began a window, notes that, and returns the
-- hits that are left. Otherwise returns a negative number: the charge must be undone.
local function left_in_begun_window(step, key, spec, before, result)
  local is_known = before > 0 and result < 9007199254740992
  if before ~= 0 and not (is_known and (spec.index - before) % 65536 <= MAX_AGE) then
    return -1 -- the clock was set back, or the state has an unknown form
  end
  begun_count, begun_keys = begun_count + 1, begun_keys or {}
  begun[begun_count], begun_keys[key] = step, true
  return spec.limit - spec.cost
end

local function charge_windows(run, keys, now)
  begun_count, begun_keys = 0, nil
  local step_keys, step_specs, ends = run.step_keys, run.step_specs, run.ends
  local reply, first = { now, nil, nil, nil, nil }, 1 -- with room, since a table that grows costs as much as a call of it
  for call = 1, run.plain do
    local last = ends[call]
    for step = first, last do
      local spec, key = step_specs[step], keys[step_keys[step]]
      local left = -1
      if not (begun_keys and begun_keys[key]) then
        local result = redis.pcall("INCRBY", key, spec.increment_text)
        if type(result) ~= "number" then
          charged_count = step - 1
          undo_windows(run, keys)
          return { now }, 0
        end
        results[step], charged_count = result, step
        if spec.placed ~= now then
          place_spec(spec, now)
        end
        local before = result - spec.increment
        local index = before % 65536
        if index == spec.index and before > 0 and result < 9007199254740992 then
          left = spec.limit - (result - index) / 65536
        else
          left = left_in_begun_window(step, key, spec, before, result)
        end
      end
      if left < 0 then
        undo_charges(run, keys, first)
        return reply, call - 1
      end
      reply[step + 1] = left
    end
    first = last + 1
  end
  return reply, run.plain
end

local function in_full(run, reply, calls)
  local full, length, first = { reply[1] }, 1, 1
  for call = 1, calls do
    length = length + 1
    full[length] = 0
    for step = first, run.ends[call] do
      full[length + 1], full[length + 2], full[length + 3] = reply[step + 1], 0, run.step_specs[step].reset
      length = length + 3
    end
    first = run.ends[call] + 1
  end
  return full, length
end

local function in_short(run, full)
  local reply, length, first = { full[1], nil, nil, nil, nil }, 2, 1
  for call = 1, run.calls do
    local last = run.ends[call]
    for step = first, last do
      reply[step + 1] = full[length + 1]
      length = length + 3
    end
    length, first = length + 1, last + 1
  end
  return reply
end

local function write_begun_windows(run, keys, now, jitter_ms, stored)
  for i = 1, begun_count do
    local step = begun[i]
    local key_index, spec = run.step_keys[step], run.step_specs[step]
    local text = format("%d", spec.increment + spec.index)
    redis.call("SET", keys[key_index], text, "PX", ttl_ms(spec.reset, jitter_ms))
    if stored then
      stored[key_index] = text
    end
  end
end

local function spend_one(key, spec, now, jitter_ms)
  local text = redis.pcall("GET", key)
  if type(text) == "table" then -- calls.lua finds out why
    return nil
  end
  local before = spec.algorithm.read(text, key, spec, now)
  if before == unknown_form then
    return nil
  end
  local after, left, retry, reset = spec.algorithm.spend(before, spec, now, spec.cost)
  if after ~= before then
    spec.algorithm.write(key, after, before, spec, now, jitter_ms)
  end
  return { now, retry ~= 0 and not spec.shadow and 1 or 0, left, retry, reset }
end
