--[[
MAX_HITS, MAX_WAIT_US, MAX_TIME_US

Maximum debt in hits, and maximum wait in microseconds (about 71 years). Larger values are clamped. Both leave room below
2^53, up to which a double is exact. States have no later time than that.
]]
local MAX_HITS = 68719476736 -- 2^36
local MAX_WAIT_US = 2251799813685248 -- 2^51
local MAX_TIME_US = 9007199254740992 -- 2^53
