--[[
needed(cost, spec) -> hits that must fit for the step to be allowed

For a cost above 0 that is the cost. A look (cost 0) depends on `charge`: with `admitted` it checks whether one more hit
would pass, with `always` whether more than the limit has been used. (Refunds do not call this.)
]]
local function needed(cost, spec)
  if cost == 0 and not spec.always then
    return 1
  end
  return cost
end
