-- usage: what a tree has used and holds, and the caps on it (SPEC 2.2 step 4).
--
-- Steps, usage and holds count for the run and for every ancestor.
--@include num
--@include hash
--@include chain
local usage = {}

-- amount, cap, reason: in the order in which they are looked at.
local AMOUNTS = {
  { "model_calls", "max_model_calls", "model_call_cap" },
  { "tokens", "max_tokens", "token_cap" },
  { "cost_micros", "max_cost_micros", "cost_cap" },
}

function usage.charge(c, used)
  if next(used) == nil then return end
  for _, run in ipairs(c.runs) do
    for _, amount in ipairs(AMOUNTS) do
      hash.add(run, amount[1], num.of(used[amount[1]]))
    end
  end
end

-- As the trace shows it: `tokens=50 model_calls=1`.
function usage.text(amounts)
  local parts = {}
  for _, amount in ipairs(AMOUNTS) do
    if amounts[amount[1]] then parts[#parts + 1] = amount[1] .. "=" .. amounts[amount[1]] end
  end
  return table.concat(parts, " ")
end

-- sign 1 holds a reservation, -1 lets it go.
function usage.hold(c, reserve, sign)
  for _, run in ipairs(c.runs) do
    for _, amount in ipairs(AMOUNTS) do
      hash.add(run, "held_" .. amount[1], sign * num.of(reserve[amount[1]]))
    end
  end
end

-- The first run of the chain, own first, that is at a cap:
-- returns run, reason, limit, observed; nil: none.
function usage.capped(c, with_steps)
  for i = #c.runs, 1, -1 do
    local run = c.runs[i]
    local limits = chain.limits(c, run)
    local cap = tonumber(limits.max_steps or "")
    if with_steps and cap and hash.int(run, "steps") >= cap then
      return run, "step_cap", cap, hash.int(run, "steps")
    end
    cap = tonumber(limits.max_wall_ms or "")
    if cap and run.elapsed_ms >= cap then
      return run, "wall_clock_cap", cap, run.elapsed_ms
    end
    for _, amount in ipairs(AMOUNTS) do
      cap = tonumber(limits[amount[2]] or "")
      local used = hash.int(run, amount[1])
      if cap and (used > cap or cap == 0) then return run, amount[3], cap, used end
    end
  end
  return nil
end

-- A reservation that does not fit beside used and held, of any run of the
-- chain: returns reason, limit, observed; nil: it fits.
function usage.unfit(c, reserve)
  if next(reserve) == nil then return nil end
  for i = #c.runs, 1, -1 do
    local run = c.runs[i]
    local limits = chain.limits(c, run)
    for _, amount in ipairs(AMOUNTS) do
      local wanted = num.of(reserve[amount[1]])
      local cap = tonumber(limits[amount[2]] or "")
      local total = hash.int(run, amount[1]) + hash.int(run, "held_" .. amount[1]) + wanted
      if wanted > 0 and cap and total > cap then return amount[3], cap, total end
    end
  end
  return nil
end

-- What is left of each cap, of the run or the ancestor that binds first.
function usage.remaining(c)
  local left, order = {}, {}
  local function note(name, value)
    if value < 0 then value = 0 end
    if not left[name] then order[#order + 1] = name end
    if not left[name] or value < left[name] then left[name] = value end
  end
  for _, run in ipairs(c.runs) do
    local limits = chain.limits(c, run)
    if limits.max_steps then note("steps", tonumber(limits.max_steps) - hash.int(run, "steps")) end
    if limits.max_wall_ms then note("wall_ms", tonumber(limits.max_wall_ms) - run.elapsed_ms) end
    for _, amount in ipairs(AMOUNTS) do
      local cap = tonumber(limits[amount[2]] or "")
      if cap then note(amount[1], cap - hash.int(run, amount[1]) - hash.int(run, "held_" .. amount[1])) end
    end
  end
  local parts = {}
  for _, name in ipairs(order) do
    parts[#parts + 1] = name .. "=" .. num.text(left[name])
  end
  return table.concat(parts, " ")
end

return usage
