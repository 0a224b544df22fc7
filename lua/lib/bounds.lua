--[[
most_hits, most_wait

How far debt goes: so many hits, and so many microseconds (about 71 years) to pay for them. More is not told apart. Both
leave room below 2^53, where a double stops to be exact.
]]
local most_hits = 68719476736 -- 2^36
local most_wait = 2251799813685248 -- 2^51
