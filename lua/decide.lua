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
             flags         +1 a quota without a limit passes; +2 shadow: the verdict is told but does not hold
ARGV[4..]  specs           six each: algorithm, limit, window_us, burst, cost, flags
             window_us     or, for a calendar's windows, three moments: "start next after" (lib/place_in_calendar.lua)
             cost          hits to spend; 0 looks; negative gives back
             flags         +1 charge always, +2 shadow_mode, +4 quota_mode, +8 of the same descriptor as the step before
Returns    { now_us, then for each call: refused 0|1, and for each of its steps: left, retry_us, reset_us }
             left          hits that still fit after this call; negative is debt
             retry_us      0 allowed; > 0 refused, and this step is admitted after exactly this long if nobody else
                           comes; -1 never
             reset_us      until the limit is as good as unused (fixed_window: until its window ends)
Cost       O(steps); sliding_log see there
]]
local byte = string.byte

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call("TIME")
  now = time[1] * 1000000 + time[2]
end
local jitter_ms = tonumber(ARGV[2])
local calls = ARGV[3]

local specs = {}
for i = 4, #ARGV, 6 do
  local flags = tonumber(ARGV[i + 5])
  local window, bounds = tonumber(ARGV[i + 2]), nil
  if not window then
    local start, next_start, after = string.match(ARGV[i + 2], "^(%d+) (%d+) (%d+)$")
    bounds = { tonumber(start), tonumber(next_start), tonumber(after) }
  end
  specs[#specs + 1] = {
    algorithm = algorithms[ARGV[i]],
    limit = tonumber(ARGV[i + 1]),
    window = window,
    bounds = bounds,
    burst = tonumber(ARGV[i + 3]),
    cost = tonumber(ARGV[i + 4]),
    always = flags % 2 >= 1,
    shadow = flags % 4 >= 2,
    quota = flags % 8 >= 4,
    joined = flags >= 8,
  }
end

-- By index into KEYS: the state as found, the state as the calls so far leave it, and who knows how to write it.
local found = redis.call("MGET", unpack(KEYS))
local original, state, owner = {}, {}, {}

-- What the current call has spent, to be undone if it is refused.
local undo_key, undo_state = {}, {}

local reply = { now }
local at, size, told = 1, #calls, 1
while at < size do
  local a, b, c, d = byte(calls, at, at + 3)
  local steps, passes, shadowed = a * 256 + b, d % 2 >= 1, d >= 2
  local first, verdict_at = at + 4, told + 1
  local failed, quotas, failed_quotas, undoable = 0, passes and 1 or 0, 0, false
  local quota_failed -- whether the descriptor at hand has failed as a quota: it does so once, however many limits it has
  told = verdict_at

  at = first
  for step = 1, steps do
    a, b, c, d = byte(calls, at, at + 3)
    at = at + 4
    local k, spec = a * 256 + b + 1, specs[c * 256 + d + 1]
    local algorithm = spec.algorithm
    local before
    if owner[k] then
      before = state[k]
    else
      before = algorithm.read(found[k], KEYS[k], spec, now)
      original[k], state[k], owner[k] = before, before, spec
    end
    local after, left, retry, reset = algorithm.spend(before, spec, now, spec.cost)
    undo_key[step], undo_state[step] = k, before
    state[k] = after
    reply[told + 1], reply[told + 2], reply[told + 3] = left, retry, reset
    told = told + 3
    undoable = undoable or not spec.always
    if spec.quota and not spec.joined then
      quotas = quotas + 1
      quota_failed = false
    end
    if retry ~= 0 and not spec.shadow then
      if spec.quota then
        failed_quotas = failed_quotas + (quota_failed and 0 or 1)
        quota_failed = true
      else
        failed = failed + 1
      end
    end
  end

  local refused = failed > 0 or (quotas > 0 and failed_quotas == quotas)
  reply[verdict_at] = refused and 1 or 0

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
        if reply[telling + 2] == 0 then
          reply[telling + 1], reply[telling + 3] = left, reset
        end
      end
      telling = telling + 3
    end
  end
end

for k = 1, #KEYS do
  if state[k] ~= original[k] then
    owner[k].algorithm.write(KEYS[k], state[k], original[k], owner[k], now, jitter_ms)
  end
end

return reply
