-- streak: refusals of one agent in a row; too many end the run (SPEC 2.2).
--@include num
--@include hash
--@include chain
--@include marks
local streak = {}

-- What a refusal with this reason counts as, when it ends the run (SPEC 2.9).
local REFUSALS = { permission_denied = true, policy_blocked = true, invalid_input = true }

-- Raises the agent's streak. Returns true when this very refusal ended the run.
function streak.raise(c, h, agent, reason, detail)
  local own, name = c.own, "s:" .. agent
  local number = hash.int(own, "resume_no")
  local count = marks.count(h, name, number) + 1
  marks.set_count(h, name, count, number)
  hash.add(own, "denied", 1)
  local limits = chain.limits(c, own)
  local cap = tonumber(limits.max_denied or "")
  if limits.mode == "observe" or not cap or count < cap then return false end
  chain.finish(c, own, reason, REFUSALS[reason] and "refusal" or "rule", detail)
  return true
end

function streak.clear(h, agent)
  hash.drop(h, "s:" .. agent)
end

return streak
