--[[
most_hits, most_wait

Maximum debt in hits, and maximum wait in microseconds (about 71 years). Larger values are clamped. Both leave room below
2^53, up to which a double is exact.
]]
local most_hits = 68719476736 -- 2^36
local most_wait = 2251799813685248 -- 2^51
