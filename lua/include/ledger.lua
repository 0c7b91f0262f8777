-- ledger: the record of an effect, its states and who may change them (SPEC 2.6).
--
--   claimed (owner, lease) -> committed | freed | in_doubt
--
-- The owner is a call id: one attempt of one client, so it is never given out
-- twice and serves as the token. A lease that ends is in doubt, never free.
--@include num
--@include hash
local ledger = {}

-- What the record says to a caller: free | conflict | committed | claimed | in_doubt | unknown.
-- unknown: a state that these scripts have no name for (a newer guardd wrote it); nothing is granted on it.
-- f: fields of the record; left_ms: what is left of a live lease.
function ledger.look(f, fp, now)
  if not f.state or f.state == "freed" then return "free", 0 end
  if f.fp and f.fp ~= "" and f.fp ~= fp then return "conflict", 0 end
  if f.state == "claimed" then
    local left_ms = num.of(f.until_ms) - now
    if left_ms > 0 then return "claimed", left_ms end
    return "in_doubt", 0
  end
  if f.state ~= "committed" and f.state ~= "in_doubt" then return "unknown", 0 end
  return f.state, 0
end

-- Tells the watchers of a new doubt, once.
local function tell(h, channel)
  redis.call("PUBLISH", channel, "event=in_doubt run=" .. h.f.run .. " key=" .. h.key)
end

-- A lease that is over puts its record in doubt at the first look. channel: nil when this record is only a copy.
function ledger.lapse(h, now, channel)
  if h.f.state == "claimed" and num.of(h.f.until_ms) <= now then
    hash.set(h, "state", "in_doubt")
    if channel then tell(h, channel) end
  end
end

-- Gives the effect to one owner. names: {owner, run, agent, tool, key, scope, fp}.
function ledger.claim(h, names, now, lease_ms)
  local is_reclaimed = h.f.reclaimed
  if h.f.owner ~= names.owner then is_reclaimed = h.f.state == "claimed" or h.f.state == "in_doubt" end
  h.is_kept = h.f.state ~= nil
  for name in pairs(h.f) do hash.drop(h, name) end
  hash.set(h, "state", "claimed")
  for name, value in pairs(names) do hash.set(h, name, value) end
  hash.set(h, "claimed_ms", now)
  hash.set(h, "until_ms", now + lease_ms)
  if is_reclaimed then hash.set(h, "reclaimed", "1") end
end

-- Takes a claim back that its owner never heard of: what it took over is in
-- doubt again, anything else is free.
function ledger.release(h, owner)
  if h.f.owner ~= owner or (h.f.state ~= "claimed" and h.f.state ~= "freed") then return "stale" end
  -- Once more is no change, but sees to the record's expiry, should that have been missed.
  if h.f.state == "freed" then h.changed.state = "freed" else hash.set(h, "state", h.f.reclaimed and "in_doubt" or "freed") end
  return "released"
end

-- Somebody wants to hear when this claim is settled, until then at the latest.
function ledger.await(h, now, wait_ms)
  local until_ms = now + (wait_ms or 0)
  if wait_ms and h.f.state == "claimed" and until_ms > num.of(h.f.awaited_ms) then
    hash.set(h, "awaited_ms", until_ms)
  end
end

-- Wakes those who wait for a claim that is settled now; without any nothing is published. A new doubt is told.
function ledger.wake(h, now, channel)
  if h.changed.state == "in_doubt" then tell(h, channel) end
  if h.f.state ~= "claimed" and num.of(h.f.awaited_ms) > now then
    redis.call("PUBLISH", channel, "event=settled key=" .. h.key)
    hash.drop(h, "awaited_ms")
  end
end

-- What a result does to its effect: commit | free | doubt.
-- committed: "1", "0" or "" (not said); is_success: false for blank and invalid results.
function ledger.outcome(status, committed, is_success)
  if committed == "1" then return "commit" end
  if committed == "0" then return "free" end
  if (status == "progress" or status == "complete") and is_success then return "commit" end
  if status == "permission_denied" or status == "policy_blocked" or status == "invalid_input"
    or status == "human_required" then
    return "free"
  end
  return "doubt"
end

local function put_result(h, prefix, result)
  for _, name in ipairs({ "value", "value_bytes", "value_digest", "operation_id", "truncated" }) do
    if result[name] and result[name] ~= "" then
      hash.set(h, prefix .. name, result[name])
    else
      hash.drop(h, prefix .. name)
    end
  end
end

-- The owner's report. Returns "held" (the record follows) or "stale" (another
-- owner or an operator was first; the late result is kept beside the record).
function ledger.report(h, owner, outcome, result, now)
  local may = h.f.owner == owner and (h.f.state == "claimed" or h.f.state == "in_doubt")
  if not may then
    -- The same report once more changes nothing.
    if h.f.owner == owner and h.f.reported == outcome then
      h.changed.reported = outcome -- but sees to the record's expiry, should that have been missed
      return "held"
    end
    if h.f.state then
      hash.set(h, "late_owner", owner)
      hash.set(h, "late_outcome", outcome)
      hash.set(h, "late_ms", now)
      put_result(h, "late_", result)
    end
    return "stale"
  end
  hash.set(h, "reported", outcome)
  if outcome == "commit" then
    hash.set(h, "state", "committed")
    hash.set(h, "committed_ms", now)
    put_result(h, "", result)
  elseif outcome == "free" then
    hash.set(h, "state", "freed")
  else
    hash.set(h, "state", "in_doubt")
  end
  return "held"
end

function ledger.renew(h, owner, now, lease_ms)
  if h.f.owner ~= owner or (h.f.state ~= "claimed" and h.f.state ~= "in_doubt") then return "stale" end
  hash.set(h, "state", "claimed")
  hash.set(h, "until_ms", now + lease_ms)
  return "renewed"
end

-- Only finished records expire; a claim or a doubt waits for somebody.
function ledger.write(h, ledger_ttl_ms)
  if not hash.is_changed(h) then return end
  if h.f.state == "committed" or h.f.state == "freed" then
    hash.write(h, ledger_ttl_ms)
  else
    hash.write(h)
  end
end

return ledger
