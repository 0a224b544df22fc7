--[[
read_spec(algorithms, text) -> the spec of one step, or of a watcher

text       "algorithm|limit|window_us|burst|cost|flags"
window_us  or, for calendar windows, three times: "start next after" (lib/place_in_calendar.lua)
cost       hits to charge; 0: look; negative: refund
flags      +1 charge always, +2 shadow_mode, +4 quota_mode, +8 same descriptor as the previous step;
           +16 for each microsecond that the step may wait for its slot (throttle; never with +1)

A watcher (penalty.lua, warning.lua) is a step after the limits of its descriptor; it defines its own meaning of these
numbers. As a Redis function, and in the embedded store, equal texts are parsed once, since rules need few.
]]
local MAX_SPECS = 1000 -- hits and limits in requests make many; when full, all are parsed again

local specs_read, spec_count = {}, 0

local function parse_spec(algorithms, text)
  local name, limit, window, burst, cost, flags = match(text, "^([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|(.*)$")
  local bounds
  local window_us = tonumber(window)
  if not window_us then
    local start, next_start, after = match(window, "^(%d+) (%d+) (%d+)$")
    bounds = { tonumber(start), tonumber(next_start), tonumber(after) }
  end
  flags, cost = flags + 0, cost + 0
  local algorithm = algorithms[name]
  local is_simple = not algorithm.is_list and not algorithm.settle and flags < 16
  local spec = {
    algorithm = algorithm,
    limit = limit + 0,
    window = window_us,
    bounds = bounds,
    burst = tonumber(burst) or burst,
    cost = cost,
    always = flags % 2 >= 1,
    shadow = flags % 4 >= 2,
    quota = flags % 8 >= 4,
    joined = flags % 16 >= 8,
    delay = floor(flags / 16),
    -- For fixed windows (fixed_window.lua). A limit that is plain can be charged by INCRBY, and its result left out of the
    -- reply but for `left` (decide.lua):
    increment = cost * 65536,
    increment_text = format("%d", cost * 65536),
    is_plain = is_simple and algorithm == algorithms.fixed_window and window_us ~= nil and cost > 0 and flags % 8 < 4,
    -- True if the state of the limit is one string and its calls never wait (short_paths.lua):
    is_simple = is_simple,
  }
  if spec.delay > 0 then -- to charge a limit whose slot the call waits for
    spec.as_debt = setmetatable({ always = true }, { __index = spec })
  end
  return spec
end

local function read_spec(algorithms, text)
  local spec = specs_read[text]
  if not spec then
    if spec_count == MAX_SPECS then
      specs_read, spec_count = {}, 0
    end
    spec = parse_spec(algorithms, text)
    specs_read[text], spec_count = spec, spec_count + 1
  end
  return spec
end
