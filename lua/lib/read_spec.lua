--[[
read_spec(algorithms, argv, at) -> what one step asks of its counter

From six arguments, of which the first is argv[at]; decide.lua says what they mean. A spec belongs to whoever asked for
it only while the script runs: the embedded store gives the same table again to who asks the same.
]]
local function read_spec(algorithms, argv, at)
  local window, bounds = tonumber(argv[at + 2]), nil
  if not window then
    local start, next_start, after = string.match(argv[at + 2], "^(%d+) (%d+) (%d+)$")
    bounds = { tonumber(start), tonumber(next_start), tonumber(after) }
  end
  local flags = tonumber(argv[at + 5])
  return {
    algorithm = algorithms[argv[at]],
    limit = tonumber(argv[at + 1]),
    window = window,
    bounds = bounds,
    burst = tonumber(argv[at + 3]) or argv[at + 3],
    cost = tonumber(argv[at + 4]),
    always = flags % 2 >= 1,
    shadow = flags % 4 >= 2,
    quota = flags % 8 >= 4,
    joined = flags % 16 >= 8,
    delay = math.floor(flags / 16),
  }
end
