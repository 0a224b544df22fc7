--[[
decide.lua — decides a batch of calls, in order, each with all of its limits in one step.

Guarantee  a call's limits are looked at together and spent together: no two calls can both take the last hit, and a
           refused call leaves no trace on limits with `charge: admitted`. Every string state is read once and written
           at most once per batch, however many calls use it (sliding_log has a list, and asks more of it). A limit
           named twice in one call sees its own first spending.

KEYS[n]    the distinct states of the batch
ARGV[1]    now_us          "" = this server's clock; tests pass a number
ARGV[2]    jitter_ms       added to every TTL
ARGV[3]    calls           big-endian 16-bit numbers: for each call (steps, flags), then for each of its steps
                           (index into KEYS, index into the specs), both from 0
             flags         +1 a quota without a limit passes; +2 shadow: the verdict is told but does not hold.
                           For each of the next, in this order, a number stands between flags and steps:
                           +4 how many microseconds the caller can wait (32 bits);
                           +8 the moment (64 bits) at which was charged what this call gives back: it is never refused,
                           and what belongs to a window that is over is not given back;
                           +16 the index into KEYS (16 bits) of the record of a call that counts once, and for how many
                           seconds it counts so (16 bits): what was answered when it counted is answered again. With +8
                           the record goes;
                           +32 hits (32 bits) in place of each step's cost: to give back, with +8; else the call takes
                           as many of them as every step has left, and that number stands where the verdict does
ARGV[4..]  specs           six each: algorithm, limit, window_us, burst, cost, flags
             window_us     or, for a calendar's windows, three moments: "start next after" (lib/place_in_calendar.lua)
             cost          hits to spend; 0 looks; negative gives back
             flags         +1 charge always, +2 shadow_mode, +4 quota_mode, +8 of the same descriptor as the step before;
                           +16 for each microsecond that the step may wait for its slot (throttle; never with +1)
           A watcher (penalty.lua, warning.lua) is a step after the limits of its descriptor, with numbers of its own.
Returns    { now_us, then for each call: refused 0|1, and for each of its steps: left, retry_us, reset_us }
             refused       +2 if that is from the record of a call that counts once, and nothing was charged now
             left          hits that still fit after this call; negative is debt
             retry_us      0 allowed; > 0 refused, and this step is admitted after exactly this long if nobody else
                           comes; -1 never; < -1 charged now for a slot that comes in -1 - retry_us microseconds
             reset_us      until the limit is as good as unused (fixed_window: until its window ends)
Cost       O(steps); sliding_log see there
]]
local byte = string.byte

local function number32(text, at)
  local a, b, c, d = byte(text, at, at + 3)
  return ((a * 256 + b) * 256 + c) * 256 + d
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

-- By index into KEYS: the state as found, the state as the calls so far leave it, and who knows how to write it.
local found = redis.call("MGET", unpack(KEYS))
local original, state, owner = {}, {}, {}

-- What the current call has spent, to be undone if it is refused.
local undo_key, undo_state = {}, {}

-- How the current call went for the limits of the descriptor at hand, as watchers see it:
--   refused   whether one of them refuses
--   retry     the longest they refuse for, -1 if one of them always will; 0: they allow, or the caller has no patience
--   holds     whether refusals hold; not under the global shadow mode
--   admitted  whether the call passes
--   usage     thousandths used of the limit that is used most
--   lowest    the same just before the call, or after it if it gave back
--   reset     until all of them are as good as unused
local fared = {}

-- By index into KEYS: what calls of this batch leave in their records, and for how many seconds; false: nothing.
local recorded, recorded_s = {}, {}

-- By place in the reply: whether a limit refuses only because the caller cannot wait as long as the rules would let it.
local hasty = {}

local reply = { now }

-- The state of a step as the calls before this one have left it.
local function state_before(k, spec)
  if not owner[k] then
    local before = spec.algorithm.read(found[k], KEYS[k], spec, now)
    original[k], state[k], owner[k] = before, before, spec
  end
  return state[k]
end

-- How many of so many hits every one of the steps has left.
local function most_left(first, steps, hits)
  for at = first, first + 4 * (steps - 1), 4 do
    local a, b, c, d = byte(calls, at, at + 3)
    local spec = specs[c * 256 + d + 1]
    local _, left = spec.algorithm.spend(state_before(a * 256 + b + 1, spec), spec, now, 0)
    hits = left < hits and left or hits
  end
  return hits > 0 and hits or 0
end

-- Answers with what the record holds, if it holds the answer to such a call; returns whether it does.
local function answer_again(record, told, steps, hits)
  local text = recorded[record]
  if text == nil then
    text = found[record]
  end
  local numbers = {}
  for number in string.gmatch(text or "", "%-?%d+") do
    numbers[#numbers + 1] = tonumber(number)
  end
  if #numbers ~= 2 + 3 * steps then -- none, or of another time's rules
    return false
  end
  local ago = now - numbers[1]
  table.remove(numbers, 1)
  for i = 1, #numbers do
    reply[told + i] = numbers[i]
    if i % 3 == 0 and numbers[i] < -1 then -- the slot it was given may have come
      local wait = -1 - numbers[i] - ago
      reply[told + i] = wait > 0 and -1 - wait or 0
    end
  end
  if not hits then -- else a number of hits stands there
    reply[told + 1] = numbers[1] + 2
  end
  return true
end

local function keep_answer(record, told, steps, seconds)
  local words = { string.format("%.0f", now) }
  for i = 1, 1 + 3 * steps do
    words[i + 1] = string.format("%.0f", reply[told + i])
  end
  recorded[record], recorded_s[record] = table.concat(words, " "), seconds
end

-- Decides the call whose steps begin at `first`, and appends what it says to the reply after place `told`. Returns whether
-- it counts: a refusal that charges nobody does not, and is decided anew if it comes again.
local function decide_call(first, told, steps, passes, shadowed, patience, charged_at, hits)
  local at, a, b, c, d
  local verdict_at, granted = told + 1, nil
  if hits and not charged_at then
    hits = most_left(first, steps, hits)
    granted = hits
  end
  local failed, quotas, failed_quotas, undoable, watched = 0, passes and 1 or 0, 0, false, false
  local charged_anyway = false
  local quota_failed -- whether the descriptor at hand has failed as a quota: it does so once, however many limits it has
  told = verdict_at

  at = first
  for step = 1, steps do
    a, b, c, d = byte(calls, at, at + 3)
    at = at + 4
    local k, spec = a * 256 + b + 1, specs[c * 256 + d + 1]
    local algorithm = spec.algorithm
    local before = owner[k] and state[k] or state_before(k, spec)
    local cost = granted or spec.cost
    if charged_at then
      before = algorithm.give_back(before, spec, now, hits or -cost, charged_at)
      cost = 0
    end
    local after, left, retry, reset = algorithm.spend(before, spec, now, cost)
    if charged_at then
      retry = 0
    end
    local longest = spec.delay < patience and spec.delay or patience
    if retry > longest then
      hasty[told] = retry <= spec.delay
      retry = retry - longest -- as soon as its slot is near enough it is admitted, and waits the rest
    elseif retry > 0 then
      if cost > 0 then -- it is charged as debt, so that whoever comes next is told of a later slot
        local wait = retry
        spec.always = true
        after, left, retry, reset = algorithm.spend(before, spec, now, cost)
        spec.always = false
        retry = -1 - wait
      else
        retry = 0
      end
    end
    undo_key[step], undo_state[step] = k, before
    state[k] = after
    reply[told + 1], reply[told + 2], reply[told + 3] = left, retry, reset
    told = told + 3
    if algorithm.settle then
      watched = true
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
        failed = failed + 1
      end
    end
  end

  local refused = failed > 0 or (quotas > 0 and failed_quotas == quotas)
  reply[verdict_at] = granted or (refused and 1 or 0)

  if refused and not shadowed and undoable then
    for step = steps, 1, -1 do
      state[undo_key[step]] = undo_state[step]
    end
    -- Once more from where the call began: `always` is charged, the others only tell how they stand.
    local telling = verdict_at
    at = first
    for _ = 1, steps do
      a, b, c, d = byte(calls, at, at + 3)
      at = at + 4
      local k, spec = a * 256 + b + 1, specs[c * 256 + d + 1]
      if spec.always then
        local after, left, retry, reset = spec.algorithm.spend(state[k], spec, now, spec.cost)
        state[k] = after
        -- Where it refused beside what is now undone, it goes on refusing: somebody must, the call was refused.
        reply[telling + 1], reply[telling + 3] = left, reset
        reply[telling + 2] = retry ~= 0 and retry or reply[telling + 2]
      else
        local after, left, _, reset = spec.algorithm.spend(state[k], spec, now, 0)
        state[k] = after
        local retry = reply[telling + 2]
        if retry == 0 or retry < -1 then
          reply[telling + 1], reply[telling + 2], reply[telling + 3] = left, 0, reset
        end
      end
      telling = telling + 3
    end
  end

  if watched then
    fared.holds, fared.admitted = not shadowed, shadowed or not refused
    local telling = verdict_at
    at = first
    for _ = 1, steps do
      a, b, c, d = byte(calls, at, at + 3)
      at = at + 4
      local k, spec = a * 256 + b + 1, specs[c * 256 + d + 1]
      local left, retry, reset = reply[telling + 1], reply[telling + 2], reply[telling + 3]
      if not spec.joined then
        fared.refused, fared.retry, fared.usage, fared.lowest, fared.reset = false, 0, 0, 0, 0
      end
      if spec.algorithm.settle then
        state[k], left, retry, reset = spec.algorithm.settle(state[k], spec, now, fared)
        reply[telling + 1], reply[telling + 2], reply[telling + 3] = left, retry, reset
      else
        local capacity = spec.burst > 0 and spec.burst or spec.limit
        local charged = spec.always or (fared.admitted and (retry == 0 or retry < -1))
        local used, taken = capacity - left, charged and spec.cost > 0 and spec.cost or 0
        local usage, lowest = used * 1000 / capacity, (used - taken) * 1000 / capacity
        fared.usage = usage > fared.usage and usage or fared.usage
        fared.lowest = lowest > fared.lowest and lowest or fared.lowest
        fared.reset = reset > fared.reset and reset or fared.reset
      end
      if retry > 0 or retry == -1 then -- a slot to wait for is no refusal
        fared.refused = true
        local is_longest = retry == -1 or (retry > fared.retry and fared.retry ~= -1) -- never is longer than any wait
        if is_longest and not hasty[telling] then
          fared.retry = retry
        end
      end
      telling = telling + 3
    end
  end
  return charged_anyway or shadowed or not refused
end

local at, size, told = 1, #calls, 1
while at < size do
  local a, b, c, flags = byte(calls, at, at + 3)
  local steps, passes, shadowed = a * 256 + b, flags % 2 >= 1, flags % 4 >= 2
  local patience, charged_at, record, seconds, hits = math.huge, nil, nil, nil, nil
  at = at + 4
  if flags >= 4 then
    if flags % 8 >= 4 then
      patience = number32(calls, at)
      at = at + 4
    end
    if flags % 16 >= 8 then
      charged_at = number32(calls, at) * 4294967296 + number32(calls, at + 4)
      at = at + 8
    end
    if flags % 32 >= 16 then
      local d
      a, b, c, d = byte(calls, at, at + 3)
      record, seconds = a * 256 + b + 1, c * 256 + d
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
  if not record or not answer_again(record, told, steps, hits) then
    local counted = decide_call(at, told, steps, passes, shadowed, patience, charged_at, hits)
    if record and counted then
      keep_answer(record, told, steps, seconds)
    end
  end
  at, told = at + 4 * steps, told + 1 + 3 * steps
end

-- Records come last: should a write fail, a call that may not have been counted must not be answered as if it were.
for k = 1, #KEYS do
  if state[k] ~= original[k] then
    owner[k].algorithm.write(KEYS[k], state[k], original[k], owner[k], now, jitter_ms)
  end
end
for k, text in pairs(recorded) do
  if text then
    redis.call("SET", KEYS[k], text, "PX", recorded_s[k] * 1000)
  else
    redis.call("DEL", KEYS[k])
  end
end

return reply
