--[[
needed(cost, spec) -> hits that must fit for the step to be allowed

A cost is what it is; a look, which costs nothing, differs by who pays. Under `admitted` it asks whether one more would
pass, under `always` whether more than the limit was used already. (A refund needs nothing, and is never asked.)
]]
local function needed(cost, spec)
  if cost == 0 and not spec.always then
    return 1
  end
  return cost
end
