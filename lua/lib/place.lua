--[[
place(now, window, state_index) -> index, into, age

The current window, relative to window `state_index`, in which a state was written (nil: no state).

  index  the window to count in, modulo 2^16. Windows are aligned to the epoch
  into   microseconds since the start of that window
  age    how many windows ago that was: 0 this one, 1 the previous one, 2 or more: older

Time never runs backwards for a state. If the clock was set back (a failover to a server that is behind), the state's
window is in the future: it stays the current one, and `into` is negative by the difference. Counting in an earlier
window would lose what was counted and admit it again.

An index modulo 2^16 repeats after 65536 windows, so a state is assumed to be less than 4096 windows in the future, or
at most MAX_AGE windows old: a state wrongly taken as old admits once more, one wrongly taken as future would deny for
hours. No state lives for 61440 windows (TTL: two windows and the jitter, which settings keep below 32768 seconds).
]]
local MAX_AGE = 61440

local function place(now, window, state_index)
  local into = now % window
  local index = (now - into) / window % 65536
  if not state_index then
    return index, into, 2
  end
  local age = (index - state_index) % 65536
  if age <= MAX_AGE then
    return index, into, age
  end
  return state_index, into - (65536 - age) * window, 0
end
