--[[
watchers.lua — passes the outcome of a descriptor's limits to its watchers (penalty.lua, warning.lua).

settle_watchers(reply, verdict_at, first, last, admitted, holds)

Called with the steps of a call once its verdict is final. A watcher is a step after the limits of its descriptor, and a
penalty that denies is part of the outcome that the warning after it sees.
]]

-- Outcome of the limits of the current descriptor:
--   denied    whether one of them denies
--   retry     the longest retry time; -1 if one of them never admits; 0: allowed, or denied only for a short deadline
--   holds     whether denials are enforced; false in the global shadow mode
--   admitted  whether the call passes
--   usage     thousandths used of the most used limit
--   lowest    the same just before the call, or after it if it was a refund
--   reset     until all of them are as if unused
local outcome = {}

-- By index into the reply: whether a limit denies only because the caller cannot wait as long as the rules allow.
local denied_by_deadline = {}

-- Adds what a limit has used to the outcome.
local function add_usage(spec, left, retry, reset)
  local capacity = spec.burst > 0 and spec.burst or spec.limit
  local charged = spec.always or (outcome.admitted and (retry == 0 or retry < -1))
  local used, charged_hits = capacity - left, charged and spec.cost > 0 and spec.cost or 0
  local usage, lowest = used * 1000 / capacity, (used - charged_hits) * 1000 / capacity
  outcome.usage = usage > outcome.usage and usage or outcome.usage
  outcome.lowest = lowest > outcome.lowest and lowest or outcome.lowest
  outcome.reset = reset > outcome.reset and reset or outcome.reset
end

local function add_denial(retry, by_deadline)
  outcome.denied = true
  -- Never (-1) is longer than any wait.
  local is_longest = retry == -1 or (retry > outcome.retry and outcome.retry ~= -1)
  if is_longest and not by_deadline then
    outcome.retry = retry
  end
end

local function settle_watchers(reply, verdict_at, first, last, admitted, holds)
  local reply_at = verdict_at
  outcome.admitted, outcome.holds = admitted, holds
  for step = first, last do
    local key_index, spec = run.step_keys[step], run.step_specs[step]
    local left, retry, reset = reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3]
    if not spec.joined then
      outcome.denied, outcome.retry, outcome.usage, outcome.lowest, outcome.reset = false, 0, 0, 0, 0
    end
    if spec.algorithm.settle then
      state[key_index], left, retry, reset = spec.algorithm.settle(state[key_index], spec, now, outcome)
      reply[reply_at + 1], reply[reply_at + 2], reply[reply_at + 3] = left, retry, reset
    else
      add_usage(spec, left, retry, reset)
    end
    if retry > 0 or retry == -1 then -- a delay is not a denial
      add_denial(retry, denied_by_deadline[reply_at])
    end
    reply_at = reply_at + 3
  end
end
