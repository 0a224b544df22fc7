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
           it calls Redis while it decides, and removes expired elements even for a look

Within one batch `now` is constant, so a batch adds at most one element and removes some of the newest.
]]
local most_entries = 20000

-- Number of newest elements that are searched for a charge to refund, and rewritten.
local most_rewritten = 64

local sliding_log = {}

local function parse_entry(text)
  local at, total = string.match(text, "^(%d+) (%d+)$")
  return { at = tonumber(at), total = tonumber(total) }
end

-- The i-th element from the front (0 is the base), fetched in chunks of growing size.
local function entry_at(log, i)
  local entries = log.entries
  while i >= log.fetched do
    local gulp = log.fetched < 8 and 8 or log.fetched
    local texts = redis.call("LRANGE", log.key, log.fetched, log.fetched + gulp - 1)
    if #texts == 0 then
      return nil
    end
    for j = 1, #texts do
      entries[log.fetched] = parse_entry(texts[j])
      log.fetched = log.fetched + 1
    end
  end
  return entries[i]
end

function sliding_log.read(found, key, spec, now)
  if found then -- a string, so not written by this script; treat as absent
    redis.call("DEL", key)
    return nil
  end
  local last = redis.call("LINDEX", key, -1)
  if not last then
    return nil
  end
  local log = { key = key, entries = {}, fetched = 0, last = parse_entry(last) }
  -- Expired elements are removed at once, even by a look, so that later calls need not skip them.
  local live = 1
  local oldest = entry_at(log, live)
  while oldest and oldest.at <= now - spec.window do
    live = live + 1
    oldest = entry_at(log, live)
  end
  if live > 1 then
    redis.call("LTRIM", key, live - 1, -1)
    local kept = {}
    for i = live - 1, log.fetched - 1 do
      kept[i - live + 1] = log.entries[i]
    end
    log.entries, log.fetched = kept, log.fetched - live + 1
  end
  log.used = log.last.total - entry_at(log, 0).total
  return { log = log, taken_back = 0, added = 0 }
end

-- The first element, from 1, whose total is at least `goal`. Totals are sorted, so this is a binary search.
local function first_reaching(log, goal)
  local low = 1
  if entry_at(log, low).total >= goal then
    return low
  end
  log.length = log.length or redis.call("LLEN", log.key)
  local high = log.length - 1
  while low < high do
    local middle = floor((low + high) / 2)
    local entry = log.entries[middle] or parse_entry(redis.call("LINDEX", log.key, middle))
    if entry.total < goal then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function peek(log, i)
  return log.entries[i] or parse_entry(redis.call("LINDEX", log.key, i))
end

-- The newest element that remains when `taken_back` hits are removed, and the number of elements after it.
local function newest_left(log, taken_back)
  local goal = log.last.total - taken_back
  local i = first_reaching(log, goal + 1)
  log.length = log.length or redis.call("LLEN", log.key)
  return peek(log, i - 1), log.length - i, peek(log, i), goal
end

-- The time at which the first `many` of the hits in use have expired.
local function expiry_of(log, taken_back, many, spec, added_at)
  if many > log.used - taken_back then
    return added_at + spec.window
  end
  return peek(log, first_reaching(log, entry_at(log, 0).total + many)).at + spec.window
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
    if allowed and used + cost <= most_hits then
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
      local left, _, newer, goal = newest_left(log, taken_back)
      newest = left.total < goal and newer or left
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
-- many. It is written at once, since a refund is never denied. A charge too far back is not refunded, nor one next to
-- elements that earlier calls of the batch have yet to write.
function sliding_log.give_back(state, _, _, hits, charged_at)
  local log = state and state.log
  if not log or not log.last or state.taken_back > 0 or state.added > 0 then
    return state
  end
  -- The newest elements, newest first, down to the one before the charge.
  local key, newest, of_then = log.key, {}, nil
  local entry = log.last
  while entry.at >= charged_at do
    newest[#newest + 1] = entry
    of_then = of_then or (entry.at == charged_at and #newest) or nil
    local text = redis.call("LINDEX", key, -#newest - 1)
    if not text or #newest == most_rewritten then
      return state
    end
    entry = parse_entry(text)
  end
  if not of_then then
    return state
  end
  local charged = newest[of_then].total - entry.total
  hits = hits < charged and hits or charged
  local most, total = newest[of_then].total - hits, entry.total
  redis.call("LTRIM", key, 0, -#newest - 1)
  for i = #newest, 1, -1 do
    local after = i < of_then and newest[i].total - hits or math.min(newest[i].total, most)
    if after > total then -- remove elements without hits
      redis.call("RPUSH", key, string.format("%.0f %.0f", newest[i].at, after))
      total = after
    end
  end
  log.entries, log.fetched, log.length = {}, 0, nil
  log.last = parse_entry(redis.call("LINDEX", key, -1))
  log.used = log.used - hits
  return state
end

function sliding_log.write(key, state, _, spec, now, jitter_ms)
  local log = state.log
  local total = log.last and log.last.total or 0
  if not log.last then
    redis.call("RPUSH", key, "0 0")
  end
  if state.taken_back > 0 then
    local left, after, newer, goal = newest_left(log, state.taken_back)
    redis.call("LTRIM", key, 0, -after - 1)
    if left.total < goal then
      redis.call("RPUSH", key, string.format("%.0f %.0f", newer.at, goal))
    end
    total = goal
  end
  if state.added > 0 then
    local entry = string.format("%.0f %.0f", state.added_at, total + state.added)
    if log.used > spec.limit and redis.call("LLEN", key) > most_entries then
      redis.call("LSET", key, -1, entry)
    else
      redis.call("RPUSH", key, entry)
    end
  end
  redis.call("PEXPIRE", key, ttl_ms(state.added_at + spec.window - now, jitter_ms))
end

algorithms.sliding_log = sliding_log
