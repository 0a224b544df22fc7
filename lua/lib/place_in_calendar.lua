--[[
place_in_calendar(now, bounds, state_index) -> index, into, age, length

Like `place`, for calendar windows. `bounds` has the start of the window around the client's current time, the start of
the next one, and its end. This server's clock selects one of the two. The index of a window is the hour of its start
modulo 2^16, about seven years: longer than any state is kept.

As in `place`, a state whose window is in the future stays in it, with `into` negative, until the clock has caught up.
]]
local function place_in_calendar(now, bounds, state_index)
  local start, after = bounds[1], bounds[2]
  local next_index = floor(after / 3600000000) % 65536
  if now >= after or state_index == next_index then
    start, after = after, bounds[3]
  end
  local index = floor(start / 3600000000) % 65536
  return index, now - start, state_index == index and 0 or 2, after - start
end
