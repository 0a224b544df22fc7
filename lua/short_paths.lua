--[[
short_paths.lua — the two ways in which nearly every call is decided. decide.lua decides what neither of them can.

charge_windows(calls, at, keys, specs, now, reply) -> at, replied, error
  Decides calls whose limits are all fixed windows, from the first call on, until one does not pass or needs a closer look:
  a state of the future, a key that was used already, an option. INCRBY charges a limit, and its result shows whether the
  state is of the current window: one command where decide.lua needs two. What a call that does not pass has charged is
  undone; Redis runs nothing in between. After an error of INCRBY everything is undone: a key may be of another type, or on
  a cluster of another server, and then the run must fail with nothing charged.
  Returns where the next call begins and the length of the reply so far; or the error.

begin_windows(now, jitter_ms, stored)
  Writes the states of windows that begin with these charges, and into `stored`, what was read since.
undo_all()
  Undoes these charges, before begin_windows.

spend_one(key, spec, now, jitter_ms) -> reply
  Decides a call that comes alone and has one limit, on a string. Returns nil if its state has an unknown form.
]]

-- Calls with more limits are rare; checking for a key that occurs twice takes quadratic time.
local most_plain_steps = 8

-- The charges of this run: key, its index, spec and the result of INCRBY of each; the numbers of those that begin a window,
-- and their keys.
local charged_keys, charged_indexes, charged_specs, charged_results, charged_count = {}, {}, {}, {}, 0
local begun, begun_count, begun_keys = {}, 0, {}

local function undo_charges(first)
  for i = charged_count, first, -1 do
    local spec = charged_specs[i]
    if charged_results[i] == spec.increment then -- it was absent, or nothing was counted
      redis.call("DEL", charged_keys[i])
    else
      redis.call("INCRBY", charged_keys[i], format("%d", -spec.increment))
    end
  end
  charged_count = first - 1
  while begun_count > 0 and begun[begun_count] > charged_count do
    begun_count = begun_count - 1
  end
end

local function undo_all()
  undo_charges(1)
end

-- Whether a key was used by the charges from `first` on, or begins a window that is not written yet.
local function is_used(key, first)
  for i = first, charged_count do
    if charged_keys[i] == key then
      return true
    end
  end
  return begun_keys[key]
end

-- Charges one limit. Returns how many hits are left, negative if it must be undone; or the error.
local function charge_window(key, key_index, spec, now)
  local result = redis.pcall("INCRBY", key, spec.increment_text)
  if type(result) ~= "number" then
    return nil, result
  end
  charged_count = charged_count + 1
  charged_keys[charged_count], charged_indexes[charged_count] = key, key_index
  charged_specs[charged_count], charged_results[charged_count] = spec, result
  place_spec(spec, now)
  local before = result - spec.increment
  local index = before % 65536
  if index == spec.index and before > 0 and result < 9007199254740992 then
    return spec.limit - (result - index) / 65536
  elseif before == 0 or (before > 0 and result < 9007199254740992 and (spec.index - index) % 65536 <= most_age) then
    begun_count = begun_count + 1
    begun[begun_count] = charged_count
    begun_keys[key] = true
    return spec.limit - spec.cost
  end
  return -1 -- the clock was set back, or it is not a state of ours
end

local function charge_windows(calls, at, keys, specs, now, reply)
  charged_count, begun_count = 0, 0
  if next(begun_keys) then
    begun_keys = {}
  end
  local size, replied = #calls, 1
  while at < size do
    local steps_high, steps_low, _, flags = byte(calls, at, at + 3)
    local steps, first = steps_high * 256 + steps_low, charged_count + 1
    if flags ~= 0 or steps > most_plain_steps then
      return at, replied
    end
    for step = 1, steps do
      local key_high, key_low, spec_high, spec_low = byte(calls, at + 4 * step, at + 4 * step + 3)
      local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
      local key = keys[key_index]
      local left, failure = -1, nil
      if spec.is_plain and not ((step > 1 or begun_count > 0) and is_used(key, first)) then
        left, failure = charge_window(key, key_index, spec, now)
      end
      if failure then
        undo_all()
        return nil, nil, failure
      elseif left < 0 then
        undo_charges(first)
        return at, replied
      end
      reply[replied + 3 * step - 1], reply[replied + 3 * step], reply[replied + 3 * step + 1] = left, 0, spec.reset
    end
    reply[replied + 1] = 0
    at, replied = at + 4 + 4 * steps, replied + 1 + 3 * steps
  end
  return at, replied
end

local function begin_windows(now, jitter_ms, stored)
  for i = 1, begun_count do
    local number = begun[i]
    local spec = charged_specs[number]
    local text = format("%d", spec.increment + spec.index)
    redis.call("SET", charged_keys[number], text, "PX", ttl_ms(spec.reset, jitter_ms))
    if stored then
      stored[charged_indexes[number]] = text
    end
  end
end

local function spend_one(key, spec, now, jitter_ms)
  local text = redis.pcall("GET", key)
  if type(text) == "table" then -- decide.lua finds out why
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
