--[[
states.lua — the states of the calls that calls.lua decides: all are read at the beginning, kept in tables while calls are
decided, and those that changed are written at the end. (short_paths.lua charges keys without these tables.)

begin_states(run, keys, stored, now)   before the calls are decided, and before they are decided again
state_before(key_index, spec)          the state of a step after the previous calls; `unknown_form` if it cannot be read
read_stored(groups, keys)              the stored texts of all keys; or nil and the error
are_new(groups)                        whether the keys about to be created are in fact missing, not keys of another type
write_states(jitter_ms)                writes every state that has changed, and the records
forget_states()                        after the run, since states may be large
]]

-- The current run, its keys and its time.
local run, keys, now

-- By index of the key: the stored text; the state that was read from it, the state after the calls so far, and the spec
-- whose algorithm writes it. The tables are cleared for each run instead of created, because filling a new table takes
-- several times as long.
local stored
local original, state, owner = {}, {}, {}
local key_count = 0 -- number of keys of the run that filled these tables

-- By index of the key: true if its state is a string and nothing was stored under the key.
local is_new = {}

-- By index of the key: the records of idempotent calls to write (false: to delete), and their lifetime in seconds.
local recorded, recorded_s = {}, {}

local function forget_states()
  for key_index = 1, key_count do
    original[key_index], state[key_index], owner[key_index] = nil, nil, nil
  end
  key_count = 0
end

local function begin_states(of_run, of_keys, texts, at)
  forget_states() -- of a run that failed, or that began again
  run, keys, stored, now = of_run, of_keys, texts, at
  key_count = #keys
  if next(is_new) then
    is_new = {}
  end
  if next(recorded) then
    recorded, recorded_s = {}, {}
  end
end

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

-- Sends one MGET for each group of keys, because an MGET cannot span slots.
local function read_stored(groups, of_keys)
  if not groups then
    local found = redis.pcall("MGET", unpack(of_keys))
    return not found.err and found, found
  end
  local texts, first = {}, 1
  for _, size in ipairs(groups) do
    local found = redis.pcall("MGET", unpack(of_keys, first, first + size - 1))
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

-- To MGET, a key of another type looks missing. So the keys that are about to be created are looked up; if one exists, its
-- state is marked as one of an unknown form, and the calls must be decided again.
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

local function write_states(jitter_ms)
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
