--[[
runs.lua — reads the text that says which calls a run decides: with which limits, and on which keys.

read_run(text) -> run

text       jitter_ms, a line for each distinct spec (lib/read_spec.lua), an empty line, and the calls
jitter_ms  added to every TTL: a number from 0 to this one, exclusive
calls      big-endian 16-bit numbers: the number of groups of keys, and the size of each; then for each call
           (steps, flags), then for each of its steps (index of the key, index of the spec), both from 0
  groups   0: all keys are in one hash slot. Otherwise they belong to several of this server, and those of one
           follow each other as a group
  flags    +1 a quota without a limit passes; +2 shadow: the verdict is reported but not enforced.
           Each of the following adds a number between flags and steps, in this order:
           +4 how many microseconds the caller can wait (32 bits);
           +8 refund: the time of the charge (64 bits). A refund is never denied, and charges of windows that have
           ended are not refunded;
           +16 idempotent call: the index of the key (16 bits) of its record, and the lifetime of the record in seconds
           (16 bits). If the record exists, the recorded result is returned again. With +8 the record is deleted;
           +32 hits (32 bits), which replace the cost of each step: to refund, with +8; otherwise the call takes as many
           of them as every step has left, and returns that number as the verdict

run        jitter_ms, groups (their sizes; nil: one hash slot), and of all calls, by number:
  steps    step_keys, step_specs: by number of the step, counted over all calls
  calls    their number; ends: the number of the last step of each; options: nil without flags (see `read_options`)
  plain    how many calls at its beginning may take the short path of fixed windows (short_paths.lua)
  lone     the spec, if it is a single call with a single limit and without flags that may take the other short path

A lone call, and a few calls of the same rules, often have the same text, since keys are numbered anew in each run. Such
texts are read once. Calls of different rules, and those with numbers of their own, have too many.
]]
local most_kept_bytes = 262144 -- of all texts; when full, all are read again

-- Mean number of steps that use a key, up to which each of them charges it. Reading it once is cheaper beyond that.
local most_charges = 16

local runs_read, kept_bytes = {}, 0

-- Reads the options of a call, which begin at `at`, and returns them and where its steps begin:
--   quota_passes, shadowed  the flags
--   max_wait                microseconds; infinite if there is no bound
--   charged_at, hits        of a refund, or hits to take; nil if there are none
--   record, record_s        index of the key of its record, and its lifetime in seconds; nil: not idempotent
local function read_options(calls, at, flags)
  local options = { quota_passes = flags % 2 >= 1, shadowed = flags % 4 >= 2, max_wait = math.huge }
  if flags % 8 >= 4 then
    options.max_wait = number32(calls, at)
    at = at + 4
  end
  if flags % 16 >= 8 then
    options.charged_at = number32(calls, at) * 4294967296 + number32(calls, at + 4)
    at = at + 8
  end
  if flags % 32 >= 16 then
    local record_high, record_low, seconds_high, seconds_low = byte(calls, at, at + 3)
    options.record, options.record_s = record_high * 256 + record_low + 1, seconds_high * 256 + seconds_low
    at = at + 4
  end
  if flags >= 32 then
    options.hits = number32(calls, at)
    at = at + 4
  end
  return options, at
end

-- Reads the sizes of the groups, and returns them and where the calls begin.
local function read_groups(text, at)
  local high, low = byte(text, at, at + 1)
  local count = high * 256 + low
  if count == 0 then
    return nil, at + 2
  end
  local groups = {}
  for group = 1, count do
    high, low = byte(text, at + 2 * group, at + 2 * group + 1)
    groups[group] = high * 256 + low
  end
  return groups, at + 2 + 2 * count
end

-- Of the current run, by line.
local specs = {}

-- Reads the lines before the calls, and returns the jitter, the number of specs, and where the rest begins.
local function read_lines(text)
  local line_end = find(text, "\n", 1, true)
  local jitter_limit_ms, count, at = sub(text, 1, line_end - 1) + 0, 0, line_end + 1
  line_end = find(text, "\n", at, true)
  while line_end > at do
    count = count + 1
    specs[count] = read_spec(algorithms, sub(text, at, line_end - 1))
    at = line_end + 1
    line_end = find(text, "\n", at, true)
  end
  return jitter_limit_ms, count, at + 1
end

local function new_run()
  return { step_keys = {}, step_specs = {}, ends = {}, options = {} }
end

-- For texts that are not kept. Entries of other runs may remain.
local scratch = new_run()

-- Reads the calls that begin at `at` into a run.
local function read_calls(run, text, at)
  local step_keys, step_specs, ends, options = run.step_keys, run.step_specs, run.ends, run.options
  local call, step, plain_calls, key_count, size = 0, 0, 0, 0, #text
  while at < size do
    local steps_high, steps_low, _, flags = byte(text, at, at + 3)
    call, at = call + 1, at + 4
    options[call] = nil
    if flags > 0 then
      options[call], at = read_options(text, at, flags)
    end
    local is_plain = flags == 0
    for _ = 1, steps_high * 256 + steps_low do
      local key_high, key_low, spec_high, spec_low = byte(text, at, at + 3)
      local key_index, spec = key_high * 256 + key_low + 1, specs[spec_high * 256 + spec_low + 1]
      step, at = step + 1, at + 4
      step_keys[step], step_specs[step] = key_index, spec
      key_count = key_index > key_count and key_index or key_count
      is_plain = is_plain and spec.is_plain
    end
    ends[call] = step
    if is_plain and plain_calls == call - 1 then
      plain_calls = call
    end
  end
  run.calls = call
  run.plain = step <= most_charges * key_count and plain_calls or 0
  run.lone = step == 1 and call == 1 and not options[1] and specs[1].is_simple and specs[1] or nil
end

local function read_run(text)
  if runs_read[text] then
    return runs_read[text]
  end
  local jitter_limit_ms, spec_count, at = read_lines(text)
  local groups
  groups, at = read_groups(text, at)
  local steps_high, steps_low, _, flags = byte(text, at, at + 3)
  local is_kept = spec_count <= steps_high * 256 + steps_low and flags < 4
  local run = is_kept and new_run() or scratch
  run.jitter_ms, run.groups = jitter_limit_ms, groups
  read_calls(run, text, at)
  if is_kept then
    kept_bytes = kept_bytes + #text
    if kept_bytes > most_kept_bytes then
      runs_read, kept_bytes = {}, #text
    end
    runs_read[text] = run
  end
  return run
end
