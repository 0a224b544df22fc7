--[[
runs.lua — reads the argument of a run: the calls that it decides, with their limits and keys.

read_run(text) -> run
groups_of(run) -> the number of keys in each group; called if there are several hash slots. The keys of a group are in
                  the same slot, and follow one another

The text has these parts:

jitter_ms  a number, and "\n". To every TTL a number from 0 up to jitter_ms, exclusive, is added
kinds      a line for each kind of call, and then an empty line. A kind is what calls of the same rules have in common:
           "flags;spec;spec;…", with a spec for each step (lib/read_spec.lua)
  flags    +1 a quota without a limit passes; +2 shadow: the verdict is reported but not enforced
calls      16-bit numbers, big-endian, in one of two forms. Nearly every run has the first form

In sequence: no key occurs twice, and no call has options. The first number is 0, and each further number is a call: the
number of its kind, counted from 0. The first call uses the first keys, one for each of its steps, the second call the
keys that follow, and so on. If there are several hash slots, the keys of each call are a group.

  0000                 in sequence
  0000                 a call of kind 0, which has one step: it uses key 0
  0001                 a call of kind 1, which has two steps: it uses keys 1 and 2

In full: any other run. The first number is the number of keys, which is never 0. Then come the number of groups (0: all
keys are in one hash slot) and the number of keys in each group; and then, for each call, the number of its kind, its
flags, the options that these flags add, and for each of its steps the index of its key, counted from 0.

  0003  0002 0001 0002                three keys, in two groups: of one key, and of two
  0000  0000            0000          a call of kind 0 without flags, on key 0
  0001  0004 0003 D090  0001 0002     a call of kind 1 that can wait 250,000 microseconds, on keys 1 and 2

The flags of a call, in the order of their options:
           +4 the caller can wait: for at most this many microseconds (32 bits)
           +8 refund: the time of the charge (64 bits). A refund is never denied, and charges of windows that have
           ended are not refunded
           +16 idempotent call: the index of the key of its record, and the lifetime of the record in seconds. If the
           record exists, its result is returned again. With +8 the record is deleted
           +32 hits (32 bits), which replace the cost of each step: to refund, with +8; otherwise the call takes as many
           of them as every step has left, and returns that number as the verdict

read_run returns a run with these fields:

jitter_ms  as in the text
groups     the numbers of keys, as in the text; nil if there are none
calls      the number of calls
ends       by number of the call: the number of its last step. Steps are counted over all calls
options    by number of the call: see `new_options`; nil if neither the call nor its kind has flags
step_keys  by number of the step: the index of its key, counted from 1
step_specs by number of the step: its spec
plain      the number of calls, from the first on, that charge_windows may decide (short_paths.lua): their limits are plain
           (`is_plain` in lib/read_spec.lua), and they have no flags
lone       the spec of a run with a single call, a single step and no flags that spend_one may decide (short_paths.lua);
           nil for any other run

Many runs have the text of an earlier run, and many kinds the line of an earlier kind. Such a run, and such a kind, is
read once.
]]
-- Bytes of the texts that are kept with their runs; a quarter of it for the lines of kinds. When full, all are dropped.
local MAX_KEPT_BYTES = 262144

-- If steps use a key at most this often, on average, each of them charges it. If more often, it is cheaper to read and
-- write it once.
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

-- Reads a kind: its specs by number, and the `options` of calls of this kind without flags; nil if the kind has no flags.
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

-- The run of any text that is not kept. Entries of earlier runs may remain in it.
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
