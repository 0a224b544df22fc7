--[[
runs.lua — reads the text that says which calls a run decides: with which limits, and on which keys.

read_run(text) -> run
groups_of(run) -> sizes of the groups of keys, if they are of several hash slots: each group is of one

text       jitter_ms, a line for each kind of call, an empty line, and the calls
jitter_ms  added to every TTL: a number from 0 to this one, exclusive
kind       "flags;spec;spec;…" (lib/read_spec.lua): what calls of the same rules have in common
  flags    +1 a quota without a limit passes; +2 shadow: the verdict is reported but not enforced
calls      big-endian 16-bit numbers. The first one is 0 if they are written in sequence, which nearly all are: no key
           occurs twice, and the calls have no options. Then each call is the number of its kind, from 0; its keys are the
           next ones, and a group. Otherwise the first one is the number of keys, and follows:
           the number of groups (0: all keys are in one hash slot), and the size of each; then for each call its kind, its
           flags, its options, and for each of its steps the index of its key, from 0
  options  each flag adds a number, in this order:
           +4 how many microseconds the caller can wait (32 bits);
           +8 refund: the time of the charge (64 bits). A refund is never denied, and charges of windows that have
           ended are not refunded;
           +16 idempotent call: the index of the key (16 bits) of its record, and the lifetime of the record in seconds
           (16 bits). If the record exists, the recorded result is returned again. With +8 the record is deleted;
           +32 hits (32 bits), which replace the cost of each step: to refund, with +8; otherwise the call takes as many
           of them as every step has left, and returns that number as the verdict

run        jitter_ms, groups (as sent; nil: none), and of all calls, by number:
  steps    step_keys, step_specs: by number of the step, counted over all calls
  calls    their number; ends: the number of the last step of each; options: nil without flags (see `new_options`)
  plain    how many calls at its beginning may take the short path of fixed windows (short_paths.lua)
  lone     the spec, if it is a single call with a single limit and without flags that may take the other short path

Calls of one kind, and those of one key, often have the same text as others before. Such texts are read once, and so are
kinds.
]]
local MAX_KEPT_BYTES = 262144 -- of all texts, and a quarter of it for kinds; when full, all are read again

-- Mean number of steps that use a key, up to which each of them charges it. Beyond that, reading it once is cheaper.
local MAX_CHARGES_PER_KEY = 16

local runs_read, run_bytes = {}, 0
local kinds_read, kind_bytes = {}, 0

-- The options of a call of this kind:
--   quota_passes, shadowed  the flags of its kind
--   max_wait                microseconds; infinite if there is no bound
--   charged_at, hits        of a refund, or hits to take; nil if there are none
--   record, record_s        index of the key of its record, and its lifetime in seconds; nil: not idempotent
local function new_options(kind)
  return { quota_passes = kind.quota_passes, shadowed = kind.shadowed, max_wait = math.huge }
end

-- Reads the options of a call, which begin at `at`, and returns them and where its steps begin.
local function read_options(kind, text, at, flags)
  local options = new_options(kind)
  if flags % 8 >= 4 then
    options.max_wait = number32(text, at)
    at = at + 4
  end
  if flags % 16 >= 8 then
    options.charged_at = number32(text, at) * 4294967296 + number32(text, at + 4)
    at = at + 8
  end
  if flags % 32 >= 16 then
    local record_high, record_low, seconds_high, seconds_low = byte(text, at, at + 3)
    options.record, options.record_s = record_high * 256 + record_low + 1, seconds_high * 256 + seconds_low
    at = at + 4
  end
  if flags >= 32 then
    options.hits = number32(text, at)
    at = at + 4
  end
  return options, at
end

-- Reads a kind. It has its specs by number, and `options` of calls that have none of their own; nil without flags.
local function parse_kind(line)
  local flags_end = find(line, ";", 1, true)
  local flags, steps, is_plain = sub(line, 1, flags_end - 1) + 0, 0, true
  local kind = {}
  for text in string.gmatch(sub(line, flags_end), ";([^;]*)") do
    local spec = read_spec(algorithms, text)
    steps, is_plain = steps + 1, is_plain and spec.is_plain
    kind[steps] = spec
  end
  kind.quota_passes, kind.shadowed = flags % 2 >= 1, flags >= 2
  kind.steps, kind.is_plain = steps, is_plain and flags == 0
  kind.options = flags > 0 and new_options(kind) or nil
  return kind
end

local function read_kind(line)
  local kind = kinds_read[line]
  if not kind then
    kind_bytes = kind_bytes + #line
    if kind_bytes > MAX_KEPT_BYTES / 4 then
      kinds_read, kind_bytes = {}, #line
    end
    kind = parse_kind(line)
    kinds_read[line] = kind
  end
  return kind
end

-- The kinds of the current run, by the number of their line.
local kinds = {}

-- Reads the lines before the calls, and returns the jitter, the number of kinds, and where the calls begin.
local function read_lines(text)
  local line_end = find(text, "\n", 1, true)
  local jitter_limit_ms, count, at = sub(text, 1, line_end - 1) + 0, 0, line_end + 1
  line_end = find(text, "\n", at, true)
  while line_end > at do
    count = count + 1
    kinds[count] = read_kind(sub(text, at, line_end - 1))
    at = line_end + 1
    line_end = find(text, "\n", at, true)
  end
  return jitter_limit_ms, count, at + 1
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

local function groups_of(run)
  if run.groups then
    return run.groups
  end
  local groups, first = {}, 1
  for call = 1, run.calls do
    groups[call], first = run.ends[call] + 1 - first, run.ends[call] + 1
  end
  return groups
end

-- The indexes of the keys of calls in sequence: 1, 2, 3 and so on, as far as they were needed.
local sequence = {}

-- Reads calls in sequence into a run.
local function read_sequence(run, text, at)
  local step_specs, ends, options = run.step_specs, run.ends, run.options
  local call, step, plain_calls, size = 0, 0, 0, #text
  while at < size do
    local high, low = byte(text, at, at + 1)
    local kind = kinds[high * 256 + low + 1]
    if kind.is_plain and plain_calls == call then
      plain_calls = call + 1
    end
    call, at = call + 1, at + 2
    options[call] = kind.options
    for number = 1, kind.steps do
      step_specs[step + number] = kind[number]
    end
    step = step + kind.steps
    ends[call] = step
  end
  for index = #sequence + 1, step do
    sequence[index] = index
  end
  run.step_keys, run.calls, run.plain = sequence, call, plain_calls
  run.lone = step == 1 and call == 1 and not options[1] and step_specs[1].is_simple and step_specs[1] or nil
end

-- Reads any other calls into a run.
local function read_in_full(run, text, at, key_count)
  local step_keys, step_specs, ends, options = {}, run.step_specs, run.ends, run.options
  local call, step, plain_calls, size = 0, 0, 0, #text
  while at < size do
    local high, low, _, flags = byte(text, at, at + 3)
    local kind = kinds[high * 256 + low + 1]
    if flags == 0 and kind.is_plain and plain_calls == call then
      plain_calls = call + 1
    end
    call, at = call + 1, at + 4
    options[call] = kind.options
    if flags > 0 then
      options[call], at = read_options(kind, text, at, flags)
    end
    for number = 1, kind.steps do
      high, low = byte(text, at, at + 1)
      step, at = step + 1, at + 2
      step_keys[step], step_specs[step] = high * 256 + low + 1, kind[number]
    end
    ends[call] = step
  end
  run.step_keys, run.calls = step_keys, call
  run.plain = step <= MAX_CHARGES_PER_KEY * key_count and plain_calls or 0
  run.lone = nil
end

local function new_run()
  return { step_specs = {}, ends = {}, options = {} }
end

-- The run of a text that is not kept. Entries of earlier runs may remain in it.
local scratch = new_run()

local function read_run(text)
  if runs_read[text] then
    return runs_read[text]
  end
  local jitter_limit_ms, kind_count, at = read_lines(text)
  local high, low = byte(text, at, at + 1)
  local key_count = high * 256 + low
  local is_kept = kind_count == 1 and key_count < 2
  local run = is_kept and new_run() or scratch
  run.jitter_ms, run.groups, at = jitter_limit_ms, nil, at + 2
  if key_count == 0 then
    read_sequence(run, text, at)
  else
    run.groups, at = read_groups(text, at)
    read_in_full(run, text, at, key_count)
  end
  if is_kept then
    run_bytes = run_bytes + #text
    if run_bytes > MAX_KEPT_BYTES then
      runs_read, run_bytes = {}, #text
    end
    runs_read[text] = run
  end
  return run
end
