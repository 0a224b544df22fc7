--[[
decide.lua — decides a batch of calls, in order, each with all of its limits in one step.

decide(KEYS, ARGV) -> reply

Guarantee  the limits of a call are checked and charged together: no two calls can both take the last hit, and a denied
           call does not change limits with `charge: admitted`. Every state is read before the first one is written, so a
           run that cannot read a key changes nothing. A limit that occurs twice in one call sees its own first charge.
           A state of an unknown form is never overwritten: its call is not decided.

KEYS       the distinct states of the batch; of several hash slots only the first one
ARGV[1]    the calls, with their limits (runs.lua)
ARGV[2]    now_us          absent or "" = this server's clock; tests pass a number
ARGV[3..]  the other keys, if there are several hash slots: those of a group together
Returns    { now_us, then for each call: verdict, and for each of its steps: left, retry_us, reset_us }
             verdict       0 allowed, 1 denied; +2 if the result is from the record of an idempotent call, and nothing was
                           charged now. -1: one of its states has an unknown form, nothing was charged; `left` of that
                           step is 1, all other numbers are 0
             left          hits that still fit after this call; negative: debt
             retry_us      0: allowed; > 0: denied, and this step is admitted after exactly this long if no other call
                           intervenes; -1: never; < -1: charged now for a slot in -1 - retry_us microseconds
             reset_us      until the limit is as if unused (fixed_window: until its window ends)
           or in short, if all calls are allowed and have only limits per fixed window: { now_us, left of each step }.
           A window begins at a multiple of its length, so the client knows when it ends.
Cost       O(steps); for sliding_log see there. Nearly every call takes a short path (short_paths.lua)
]]

local function current_time(time_text)
  if time_text and time_text ~= "" then
    return time_text + 0
  end
  local time = redis.call("TIME")
  return time[1] * 1000000 + time[2]
end

local function decide(KEYS, ARGV)
  local run = read_run(ARGV[1])
  local now, keys = current_time(ARGV[2]), KEYS
  local jitter_ms = run.jitter_ms == 0 and 0 or jitter(now, run.jitter_ms)
  if ARGV[3] then
    keys = { KEYS[1] }
    for i = 3, #ARGV do
      keys[i - 1] = ARGV[i]
    end
  end

  local reply, decided, replied = { now }, 0, 1
  if run.plain > 0 then
    reply, decided = charge_windows(run, keys, now)
    if decided == run.calls then
      begin_windows(run, keys, now, jitter_ms)
      return reply
    end
    reply, replied = in_full(run, reply, decided)
  end
  if run.lone then
    local answer = spend_one(keys[1], run.lone, now, jitter_ms)
    if answer then
      return answer
    end
  end

  local groups = ARGV[3] and groups_of(run)
  local stored, failure = read_stored(groups, keys)
  if not stored then
    if decided > 0 then
      undo_windows(run, keys)
    end
    return failure
  end
  if decided > 0 then
    begin_windows(run, keys, now, jitter_ms, stored)
  end
  begin_states(run, keys, stored, now)
  local are_plain = decide_calls(reply, decided + 1, replied)
  while next(is_new) and not are_new(groups) do
    begin_states(run, keys, stored, now)
    are_plain = decide_calls(reply, decided + 1, replied)
  end
  write_states(jitter_ms)
  forget_states()
  return are_plain and in_short(run, reply) or reply
end
