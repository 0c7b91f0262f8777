-- limits: the caps of a run as text, and what counts as tighter (SPEC 2.10).
--
-- `name=value` in the order of the policy; an absent cap is unlimited, `-`
-- among changes takes a cap away.
--@include pack
local limits = {}

-- Where more, not less, is the stricter value.
local MORE_IS_TIGHTER = { cycle_window = true, max_cycle_period = true }
-- Words from loose to strict.
local WORDS = {
  on_refusal = { deny = 1, stop = 2 },
  mode = { observe = 1, enforce = 2 },
  window_scope = { agent = 1, run = 2, tree = 3 },
}

-- Would `value` (nil or "-": unlimited) loosen `current` (nil: unlimited)?
function limits.loosens(name, current, value)
  if name == "claim_lease_ms" then return false end
  if WORDS[name] then
    return (WORDS[name][value] or 0) < (WORDS[name][current] or 0)
  end
  local old, new = tonumber(current or ""), tonumber(value or "")
  if MORE_IS_TIGHTER[name] then
    return new ~= nil and (old == nil or new < old)
  end
  return old ~= nil and (new == nil or new > old)
end

-- The first change that loosens, by name; nil: none does.
function limits.first_looser(text, changes)
  local current = pack.parse(text)
  local names = {}
  for name in pairs(changes) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    if limits.loosens(name, current[name], changes[name]) then return name, current[name] end
  end
  return nil
end

-- The text with the changes; order is kept, new names go last.
function limits.merge(text, changes)
  local parts, seen = {}, {}
  for name, value in string.gmatch(text, "([%w_]+)=(%S*)") do
    seen[name] = true
    local new = changes[name] or value
    if new ~= "-" then parts[#parts + 1] = name .. "=" .. new end
  end
  local names = {}
  for name in pairs(changes) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    if not seen[name] and changes[name] ~= "-" then parts[#parts + 1] = name .. "=" .. changes[name] end
  end
  return table.concat(parts, " ")
end

-- The stricter of two texts, cap by cap: what a sub-run gets from a policy.
function limits.tighten(text, other)
  local current, changes = pack.parse(text), {}
  for name, value in pairs(pack.parse(other)) do
    if not limits.loosens(name, current[name], value) then changes[name] = value end
  end
  return limits.merge(text, changes)
end

return limits
