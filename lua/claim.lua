-- claim: give exactly one call the right to a global effect (SPEC 2.6).
--
-- KEYS[1]  op_key      hash    ledger record of a global key
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  lease_ms    int     how long the claim is held, > 0
-- ARGV[3]  owner       str     call id
-- ARGV[4]  fp          str     full fingerprint of the call
-- ARGV[5]  run         str     path of the run that asks
-- ARGV[6]  agent       str     label, may be empty
-- ARGV[7]  tool        str     canonical name
-- ARGV[8]  key         str     effect key
-- ARGV[9]  reclaim     str     1: a claim in doubt may be taken over
-- RETURNS {status}    "won" | "lost": look again what the record says
-- ERRORS  -
-- EXPIRES op_key: never while claimed
-- FLAGS   -
--@include clock
--@include hash
--@include ledger
--@bind

local now = clock.now(now_ms)
local op = hash.read(op_key)
local says = ledger.look(op.f, fp, now)
local is_mine = op.f.owner == owner and says == "claimed"
if not is_mine and says ~= "free" and not (says == "in_doubt" and reclaim == "1") then
  return { "lost" }
end
if not is_mine then
  ledger.claim(op, { owner = owner, run = run, agent = agent, tool = tool, key = key, scope = "global", fp = fp },
    now, lease_ms)
  hash.write(op)
end
return { "won" }
