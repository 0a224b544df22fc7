--[[
place_in_calendar(now, bounds, mine) -> index, into, age, length

As `place`, for windows of a calendar: `bounds` has the moments at which the window around the client's now begins, the
next one does, and that one ends. This server's clock picks between the two. A window's index is the hour it begins in
modulo 2^16, about seven years: longer than any state is kept.

As there, a state whose window lies ahead stays in it, with `into` negative, until the clock has caught up.
]]
local function place_in_calendar(now, bounds, mine)
  local start, after = bounds[1], bounds[2]
  local next_index = floor(after / 3600000000) % 65536
  if now >= after or mine == next_index then
    start, after = after, bounds[3]
  end
  local index = floor(start / 3600000000) % 65536
  return index, now - start, mine == index and 0 or 2, after - start
end
