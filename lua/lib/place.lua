--[[
place(now, window, mine) -> index, into, age

Where `now` lies, seen from the window `mine` that a state was written in (nil: no state).

  index  the window to count in, modulo 2^16. Windows are aligned to the epoch
  into   microseconds since that window began
  age    how many windows ago `mine` was: 0 this one, 1 the one before, 2 or more long over

Time never runs backwards for a state. If the clock was set back (a failover to a server that is behind), the state's
window lies ahead: it stays the current one, and `into` is negative by as much as it lies ahead. Counting in an
earlier window instead would forget what was counted and admit it again.

An index modulo 2^16 repeats after 65536 windows; a state that old has long expired (TTL: two windows and a little).
]]
local function place(now, window, mine)
  local index = floor(now / window)
  local into = now - index * window
  index = index % 65536
  if not mine then
    return index, into, 2
  end
  local age = (index - mine) % 65536
  if age < 32768 then
    return index, into, age
  end
  return mine, into - (65536 - age) * window, 0
end
