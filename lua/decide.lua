--[[
decide.lua — decides a batch of calls, in order, each with all of its limits atomically.

decide(KEYS, ARGV) -> reply

Guarantee  the limits of a call are checked and charged together: no two calls can both take the last hit, and a denied
           call does not change limits with `charge: admitted`. Redis runs a script or function to its end before it runs
           any other client's commands. A run that cannot read a key leaves every key as it was: calls.lua writes
           after all states are read, and short_paths.lua, which charges at once, undoes its charges. A limit that
           occurs twice in one call sees its own first charge.
           A state of an unknown form is never overwritten: its call is not decided.

KEYS       the keys of the batch, each once; if they are in several hash slots, only the first key
ARGV[1]    the calls, with their limits (runs.lua)
ARGV[2]    now_us          absent or "" = this server's clock; tests pass a number
ARGV[3..]  the other keys, if they are in several hash slots: keys of the same slot follow one another
Returns    { now_us, then for each call: verdict, and for each of its steps: left, retry_us, reset_us }
             verdict       0 allowed, 1 denied; +2 if the result is from the record of an idempotent call, and nothing was
                           charged now. -1: one of its states has an unknown form, nothing was charged; `left` of that
                           step is 1, all other numbers are 0
             left          hits that still fit after this call; negative: debt
             retry_us      0: allowed; > 0: denied, and this step is admitted after exactly this long if no other call
                           intervenes; -1: never; < -1: charged now for a slot in -1 - retry_us microseconds
             reset_us      until the limit is as if unused (fixed_window: until its window ends)
           or in short, which the number of values shows: { now_us, left of each step }. A reply can be short only if
           every limit of every call allows and is plain: a fixed window of a constant length (not a calendar's), with a
           cost above 0, outside of quota mode, that no call may wait for; and no call has flags or watchers. The client
           computes reset_us of each limit from now_us and the length of its window, at a multiple of which it began
Cost       O(steps); for sliding_log see there. Most calls take a short path (short_paths.lua)
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
      write_begun_windows(run, keys, now, jitter_ms)
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
    write_begun_windows(run, keys, now, jitter_ms, stored)
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
