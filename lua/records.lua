--[[
records.lua — results of idempotent calls, so that a call that is sent again is not charged again.

is_unreadable(record)                                whether what is stored is not a record
reply_from_record(reply, replied, record, steps, hits)
                                                     replies with the recorded result, reduced by the time elapsed; returns
                                                     whether there is one for such a call
record_result(reply, replied, record, steps, seconds)
                                                     keeps a result, to be written at the end of the run
forget_record(record)                                the record of a refunded call is deleted

A record has the time, the verdict, and the three numbers of each step as a reply has them. `record` is the index of its
key, and `replied` the length of the reply before the call.
]]

local function is_unreadable(record)
  local text = stored[record]
  return text and (text == unknown_form or find(text, "[^%d -]"))
end

local function reply_from_record(reply, replied, record, steps, hits)
  local text = recorded[record]
  if text == nil then
    text = stored[record]
  end
  local numbers = {}
  for number in string.gmatch(text or "", "%-?%d+") do
    numbers[#numbers + 1] = tonumber(number)
  end
  if #numbers ~= 2 + 3 * steps then -- no record, or one of other rules
    return false
  end
  local elapsed = now - numbers[1]
  table.remove(numbers, 1)
  for i = 1, #numbers do
    reply[replied + i] = numbers[i]
    if i % 3 == 0 and numbers[i] < -1 then -- reduce the delay by the time elapsed
      local wait = -1 - numbers[i] - elapsed
      reply[replied + i] = wait > 0 and -1 - wait or 0
    end
  end
  if not hits then -- otherwise this is a number of hits
    reply[replied + 1] = numbers[1] + 2
  end
  return true
end

local function record_result(reply, replied, record, steps, seconds)
  local words = { format("%d", now) }
  for i = 1, 1 + 3 * steps do
    words[i + 1] = format("%d", reply[replied + i])
  end
  is_new[record] = not stored[record] or nil
  recorded[record], recorded_s[record] = table.concat(words, " "), seconds
end

local function forget_record(record)
  recorded[record] = false
end
