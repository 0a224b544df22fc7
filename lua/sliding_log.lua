--[[
sliding_log.lua — at most `limit` hits in the last `window`, exactly: every hit is stored until it is that old.

State      a list of texts "at total", oldest first: at time `at` the number of all hits counted so far was `total`.
           The first element is the base: it is older than the window (or "0 0") and defines where totals start, so
           used = total of the last - total of the first
Bounds     limit <= 10000 (checked when rules load), totals < 2^53. Admitted hits need at most `limit` elements; debt
           (charge: always) is exact up to 20000 elements, then it is added to the newest, which only prolongs it
Retry      when enough of the oldest hits become `window` old; a cost above the limit never fits
Reset      when the newest hit becomes `window` old
Cost       elements expired plus elements added; a denial, a refund and a lookup use binary search. Unlike the others
           it reads from Redis while it decides, as many elements as it needs

Within one batch `now` is constant, so a batch adds at most one element and removes some of the newest.
]]
local MAX_ENTRIES = 20000

-- Number of newest elements that are searched for a charge to refund, and rewritten.
local MAX_REWRITTEN = 64

local sliding_log = { is_list = true }

-- A log is a view of the list, in which the base is element 0:
--   key        of the list
--   expired    number of elements before the base, which the next write removes
--   entries    elements that were read, by index
--   length     number of elements; nil: not yet known
--   tail_at    index from which `tail` stands in place of what is stored; nil: nowhere
--   last       the newest element; nil: the list does not exist
--   used       hits in use, from the base to the newest element
local function parse_entry(text)
  local at, total = match(text, "^(%d+) (%d+)$")
  return at and { at = at + 0, total = total + 0 }
end

local function element(log, i)
  if log.tail_at and i >= log.tail_at then
    return log.tail[i - log.tail_at + 1]
  end
  local entry = log.entries[i]
  if not entry then
    entry = parse_entry(redis.call("LINDEX", log.key, format("%d", log.expired + i)))
    log.entries[i] = entry
  end
  return entry
end

local function length(log)
  log.length = log.length or redis.call("LLEN", log.key) - log.expired
  return log.length
end

-- Reads elements from the oldest on, in chunks of growing size, until one is not older than the window: the last one
-- before it is the base. Returns the elements, and the index of the base; nil if one has an unknown form.
local function read_from_base(key, oldest_us)
  local entries, count, base = {}, 0, 0
  while true do
    local chunk = count < 8 and 8 or count
    local texts = redis.call("LRANGE", key, format("%d", count), format("%d", count + chunk - 1))
    for i = 1, #texts do
      local entry = parse_entry(texts[i])
      if not entry then
        return nil
      end
      entries[count + i - 1] = entry
      if entry.at <= oldest_us then
        base = count + i - 1
      end
    end
    count = count + #texts
    if #texts < chunk or entries[count - 1].at > oldest_us then
      return entries, base
    end
  end
end

function sliding_log.read(found, key, spec, now)
  if found then
    return unknown_form
  end
  local newest = redis.pcall("LINDEX", key, "-1")
  if not newest then
    return nil
  end
  local last = type(newest) == "string" and parse_entry(newest)
  local entries, base
  if last then
    entries, base = read_from_base(key, now - spec.window)
  end
  if not entries then
    return unknown_form
  end
  local log = { key = key, expired = base, entries = {}, last = last, used = last.total - entries[base].total }
  for i = base, #entries do
    log.entries[i - base] = entries[i]
  end
  return { log = log, taken_back = 0, added = 0 }
end

-- The first element, from 1, whose total is at least `goal`. Totals are sorted, so this is a binary search.
local function first_reaching(log, goal)
  local low = 1
  if element(log, low).total >= goal then
    return low
  end
  local high = length(log) - 1
  while low < high do
    local middle = floor((low + high) / 2)
    if element(log, middle).total < goal then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- When `taken_back` hits are removed: the index of the newest element that remains, the element after it, and the total
-- that is left.
local function newest_left(log, taken_back)
  local goal = log.last.total - taken_back
  local i = first_reaching(log, goal + 1)
  return i - 1, element(log, i), goal
end

-- The time at which the first `many` of the hits in use have expired.
local function expiry_of(log, taken_back, many, spec, added_at)
  if many > log.used - taken_back then
    return added_at + spec.window
  end
  return element(log, first_reaching(log, element(log, 0).total + many)).at + spec.window
end

function sliding_log.spend(state, spec, now, cost)
  local limit = spec.limit
  local before = state or { log = { used = 0 }, taken_back = 0, added = 0 }
  local log, taken_back, added = before.log, before.taken_back, before.added
  local added_at = log.last and log.last.at > now and log.last.at or now -- the clock was set back
  local used = log.used - taken_back + added
  local allowed, retry = true, 0

  if cost < 0 then
    local fresh = added + cost > 0 and added + cost or 0
    local older = -cost - (added - fresh)
    taken_back = taken_back + older < log.used and taken_back + older or log.used
    added = fresh
  else
    local need = needed(cost, spec)
    local over = used + need > limit
    allowed = not over or spec.always
    if allowed and used + cost <= MAX_HITS then
      added = added + cost
    end
    if over and need > limit then
      retry = -1
    elseif over then
      retry = expiry_of(log, taken_back, log.used - taken_back + added + need - limit, spec, added_at) - now
    end
  end

  local reset = 0
  if added > 0 then
    reset = added_at + spec.window - now
  elseif log.used - taken_back > 0 then
    local newest = log.last
    if taken_back > 0 then
      local left, newer, goal = newest_left(log, taken_back)
      newest = element(log, left).total < goal and newer or element(log, left)
    end
    reset = newest.at + spec.window - now
  end
  used = log.used - taken_back + added
  if not allowed or cost == 0 or (cost < 0 and not state) then
    return state, limit - used, retry, reset
  end
  return { log = log, taken_back = taken_back, added = added, added_at = added_at }, limit - used, retry, reset
end

-- Refunds hits that were charged at a given time, and no newer ones: these expire later, so removing them would admit too
-- many. A charge too far back is not refunded, nor one next to elements that earlier calls of the batch have yet to write.
function sliding_log.give_back(state, _, _, hits, charged_at)
  local log = state and state.log
  if not log or not log.last or state.taken_back > 0 or state.added > 0 then
    return state
  end
  -- The newest elements, newest first, down to the one before the charge.
  local newest, of_then, at = {}, nil, length(log) - 1
  local entry = log.last
  while entry.at >= charged_at do
    newest[#newest + 1] = entry
    of_then = of_then or (entry.at == charged_at and #newest) or nil
    at = at - 1
    if at < 0 or #newest == MAX_REWRITTEN then
      return state
    end
    entry = element(log, at)
  end
  if not of_then then
    return state
  end
  local charged = newest[of_then].total - entry.total
  hits = hits < charged and hits or charged
  local max_total, total, tail = newest[of_then].total - hits, entry.total, {}
  for i = #newest, 1, -1 do
    local after = i < of_then and newest[i].total - hits or math.min(newest[i].total, max_total)
    if after > total then -- without elements that have no hits
      tail[#tail + 1] = { at = newest[i].at, total = after }
      total = after
    end
  end
  local refunded = {}
  for name, value in pairs(log) do
    refunded[name] = value
  end
  -- A tail of an earlier refund of this batch begins here or later, because it follows the charge before it.
  local tail_at = at + 1
  if log.tail_at and log.tail_at < tail_at then
    for i = tail_at - 1, log.tail_at, -1 do
      table.insert(tail, 1, element(log, i))
    end
    tail_at = log.tail_at
  end
  refunded.tail_at, refunded.tail, refunded.length = tail_at, tail, tail_at + #tail
  refunded.last = tail[#tail] or entry
  refunded.used = log.used - hits
  return { log = refunded, taken_back = 0, added = 0 }
end

function sliding_log.write(key, state, _, spec, now, jitter_ms)
  local log = state.log
  local total = log.last and log.last.total or 0
  local kept, added = log.tail_at, log.tail or {} -- what is stored below index `kept` stays; nil: all of it
  if not log.last then
    added = { { at = 0, total = 0 } }
  end
  if state.taken_back > 0 then
    local left, newer, goal = newest_left(log, state.taken_back)
    local tail = {}
    for i = kept or left + 1, left do
      tail[#tail + 1] = element(log, i)
    end
    if element(log, left).total < goal then
      tail[#tail + 1] = { at = newer.at, total = goal }
    end
    kept, added, total = kept and kept < left + 1 and kept or left + 1, tail, goal
  end
  if kept then
    redis.call("LTRIM", key, format("%d", log.expired), format("%d", log.expired + kept - 1))
  elseif log.expired and log.expired > 0 then
    redis.call("LTRIM", key, format("%d", log.expired), "-1")
  end
  for _, entry in ipairs(added) do
    redis.call("RPUSH", key, format("%d %d", entry.at, entry.total))
  end
  if state.added > 0 then
    local entry = format("%d %d", state.added_at, total + state.added)
    if log.used > spec.limit and redis.call("LLEN", key) > MAX_ENTRIES then
      redis.call("LSET", key, "-1", entry)
    else
      redis.call("RPUSH", key, entry)
    end
  end
  if state.added_at then -- a refund leaves the TTL, which is long enough
    redis.call("PEXPIRE", key, ttl_ms(state.added_at + spec.window - now, jitter_ms))
  end
end

algorithms.sliding_log = sliding_log
