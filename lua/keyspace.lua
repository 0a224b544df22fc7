--[[
keyspace.lua — in-process replacement for Redis: the commands that the scripts use, over Lua tables.

new_keyspace(budget_bytes) -> redis, set_now, size, settle

Guarantee  the commands reply as Redis does for the arguments that the scripts pass. Memory stays within the budget:
           expired keys are removed first when they are visited, then the least recently used ones. Keys evicted before
           they expire are counted, since losing them may admit too many calls.

Only the embedded store loads this file; it is not sent to Redis.
]]

-- Memory of one key besides its text, including the garbage collector's slack: measured by filling a keyspace and
-- dividing the growth of the process. Verified by tests/unit/store/test_embedded.py.
local entry_bytes = 640
local element_bytes = 170 -- one element of a list

local function new_keyspace(budget_bytes)
  local index, now, used, count, evicted = {}, 0, 0, 0, 0
  -- A circular list in order of use: ring.next is the most recently used key, ring.prev the least recently used one.
  local ring = {}
  ring.next, ring.prev = ring, ring
  local hand, writes = ring, 0

  local function forget(entry)
    if entry == hand then
      hand = entry.next
    end
    entry.prev.next, entry.next.prev = entry.next, entry.prev
    index[entry.key] = nil
    used, count = used - entry.bytes, count - 1
  end

  local function touch(entry)
    entry.prev.next, entry.next.prev = entry.next, entry.prev
    entry.next, entry.prev = ring.next, ring
    ring.next.prev, ring.next = entry, entry
  end

  local function lookup(key)
    local entry = index[key]
    if not entry then
      return nil
    end
    if entry.expires <= now then
      forget(entry)
      return nil
    end
    touch(entry)
    return entry
  end

  local function resize(entry, bytes)
    used = used + bytes - entry.bytes
    entry.bytes = bytes
  end

  local function create(key)
    local entry = { key = key, expires = math.huge, bytes = 0, next = ring.next, prev = ring }
    ring.next.prev, ring.next = entry, entry
    index[key] = entry
    count = count + 1
    return entry
  end

  -- After a run, never during one: what the run has read must still exist when it writes. Every write advances the hand
  -- by two entries, in any order of use, so that expired keys do not displace live ones; then the least recently used
  -- keys are evicted.
  local function settle()
    for _ = 1, 2 * writes do
      hand = hand.prev
      if hand ~= ring and hand.expires <= now then
        local entry = hand
        hand = entry.next
        forget(entry)
      end
    end
    writes = 0
    while used > budget_bytes do
      local entry = ring.prev
      if entry.expires > now then
        evicted = evicted + 1
      end
      forget(entry)
    end
  end

  local commands = {}

  function commands.MGET(...)
    local values = {}
    for i = 1, select("#", ...) do
      local entry = lookup((select(i, ...)))
      values[i] = entry and entry.value or false
    end
    return values
  end

  function commands.GET(key)
    local entry = lookup(key)
    return entry and entry.value or false
  end

  function commands.SET(key, value, option, ms)
    local entry = lookup(key) or create(key)
    entry.value, entry.list = value, nil
    if option == "PX" then
      entry.expires = now + tonumber(ms) * 1000
    else
      entry.expires = math.huge
    end
    resize(entry, entry_bytes + #key + (type(value) == "string" and #value or 0))
    writes = writes + 1
  end

  -- The number is stored as one, not as text.
  function commands.INCRBY(key, increment)
    local entry = lookup(key)
    if not entry then
      entry = create(key)
      entry.value = 0
    end
    local value = tonumber(entry.value)
    if not value then
      error("ERR value is not an integer or out of range")
    end
    entry.value = value + tonumber(increment)
    resize(entry, entry_bytes + #key)
    writes = writes + 1
    return entry.value
  end

  function commands.EXISTS(...)
    local found = 0
    for i = 1, select("#", ...) do
      found = found + (lookup((select(i, ...))) and 1 or 0)
    end
    return found
  end

  -- A list is stored between `first` and `last`, so that both ends can move without shifting the elements.
  local function range(list, from, to)
    from, to = tonumber(from), tonumber(to)
    local length = list.last - list.first + 1
    from = from < 0 and math.max(length + from, 0) or from
    to = to < 0 and length + to or math.min(to, length - 1)
    return list.first + from, list.first + to
  end

  function commands.LLEN(key)
    local entry = lookup(key)
    return entry and entry.list.last - entry.list.first + 1 or 0
  end

  function commands.LINDEX(key, i)
    local entry = lookup(key)
    if not entry then
      return false
    end
    local list = entry.list
    i = tonumber(i)
    return list[i < 0 and list.last + 1 + i or list.first + i] or false
  end

  function commands.LRANGE(key, from, to)
    local entry = lookup(key)
    local values = {}
    if entry then
      local first, last = range(entry.list, from, to)
      for i = first, last do
        values[#values + 1] = entry.list[i]
      end
    end
    return values
  end

  function commands.LTRIM(key, from, to)
    local entry = lookup(key)
    if not entry then
      return
    end
    local list = entry.list
    local first, last = range(list, from, to)
    for i = list.first, math.min(first - 1, list.last) do
      list[i] = nil
    end
    for i = math.max(last + 1, list.first), list.last do
      list[i] = nil
    end
    list.first, list.last = first, last
    if first > last then
      forget(entry)
    else
      resize(entry, entry_bytes + #key + (last - first + 1) * element_bytes)
    end
  end

  function commands.LSET(key, i, value)
    local list = lookup(key).list
    i = tonumber(i)
    list[i < 0 and list.last + 1 + i or list.first + i] = value
  end

  function commands.RPUSH(key, value)
    local entry = lookup(key)
    if not entry then
      entry = create(key)
      entry.list = { first = 1, last = 0 }
    end
    local list = entry.list
    list.last = list.last + 1
    list[list.last] = value
    resize(entry, entry_bytes + #key + (list.last - list.first + 1) * element_bytes)
    writes = writes + 1
  end

  function commands.DEL(key)
    local entry = lookup(key)
    if not entry then
      return 0
    end
    forget(entry)
    return 1
  end

  function commands.PEXPIRE(key, ms)
    local entry = lookup(key)
    if entry then
      entry.expires = now + tonumber(ms) * 1000
    end
  end

  local redis = {}

  function redis.call(command, ...)
    return commands[command](...)
  end

  function redis.pcall(command, ...)
    local done, result = pcall(commands[command], ...)
    if done then
      return result
    end
    return { err = tostring(result) }
  end

  local function set_now(us)
    now = us
  end

  local function size()
    return count, used, evicted
  end

  return redis, set_now, size, settle
end
