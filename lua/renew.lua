-- renew: the tool still runs; keep its claim and hear whether to stop (SPEC 2.6).
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  op_key      hash    ledger record of a run-scoped key; untouched without one
-- KEYS[3+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, calls_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  run         str     path
-- ARGV[5]  call        str     call id
-- ARGV[6]  op_digest   str     the ledger record the daemon passed, may be empty
-- ARGV[7]  lease_ms    int     from now
-- ARGV[8]  usage_map   map     model_calls, tokens, cost_micros
-- ARGV[9]  global_claim str    renewed | stale: what the global record said; empty: not asked yet
-- RETURNS {action, reason, name, value, ...}   or {"call", tool, digest, scope}: renew this record
--         or {"global", ""}: renew the global record first
-- ERRORS  GUARD_UNKNOWN_CALL
-- EXPIRES run_keys: run_ttl_ms; calls_key: only read; op_key: never while claimed
-- FLAGS   allow-oom
--@include pack
--@include clock
--@include hash
--@include chain
--@include usage
--@include calls
--@include ledger
--@include answer
--@bind

local now = clock.now(now_ms)
local c = chain.enter(run_keys, run, now, nil)
if not c.own then return redis.error_reply("GUARD_UNKNOWN_CALL this run has admitted no such call") end
local call_field = "c:" .. call
local ids = calls.fetch(calls_key, c.root, call_field, tonumber(settings.calls_max))
local known = calls.get(ids, call_field)
if not known or known.run ~= run or known.state == "said" then
  return redis.error_reply("GUARD_UNKNOWN_CALL this run has admitted no such call")
end
local action, reason = chain.state(c)
if known.state == "done" then
  return answer.say(action, reason, answer.run(c, { claim = known.claim == "stale" and "stale" or "reported" }))
end
if op_digest ~= (known.key or "") then
  return { "call", pack.unescape(known.tool), known.key or "", known.scope or "" }
end
if known.scope == "global" and global_claim == "" then return { "global", "" } end
local claim = global_claim
if known.scope == "run" then
  local op = hash.read(op_key)
  claim = ledger.renew(op, call, now, lease_ms)
  ledger.write(op, settings.ledger_ttl_ms)
end
usage.charge(c, usage_map)
chain.write(c, settings.run_ttl_ms, channel)
return answer.say(action, reason, answer.run(c, { claim = claim }))
