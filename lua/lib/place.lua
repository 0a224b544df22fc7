--[[
place(now, window, mine) -> index, into, age

Where `now` lies, seen from the window `mine` that a state was written in (nil: no state).

  index  the window to count in, modulo 2^16. Windows are aligned to the epoch
  into   microseconds since that window began
  age    how many windows ago `mine` was: 0 this one, 1 the one before, 2 or more long over

Time never runs backwards for a state. If the clock was set back (a failover to a server that is behind), the state's
window lies ahead: it stays the current one, and `into` is negative by as much as it lies ahead. Counting in an
earlier window instead would forget what was counted and admit it again.

An index modulo 2^16 repeats after 65536 windows, so a state is taken to lie ahead by less than 4096 windows or to be
old: one that is wrongly old admits once more, one that is wrongly ahead would refuse for hours. No state lives for
61440 windows (TTL: two windows and the jitter, which settings keep below 32768 seconds).
]]
local function place(now, window, mine)
  local index = floor(now / window)
  local into = now - index * window
  index = index % 65536
  if not mine then
    return index, into, 2
  end
  local age = (index - mine) % 65536
  if age <= 61440 then
    return index, into, age
  end
  return mine, into - (65536 - age) * window, 0
end
