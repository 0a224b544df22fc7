--[[
read_spec(algorithms, argv, at) -> the spec of one step

Parses six arguments, of which the first is argv[at]; decide.lua documents them. A spec may be changed only during one
run of the script: the embedded store returns the same table again for equal arguments.
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
