-- report: the owner of a global effect says what became of it (SPEC 2.6).
--
-- KEYS[1]  op_key      hash    ledger record of a global key
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     ledger_ttl_ms
-- ARGV[3]  owner       str     call id
-- ARGV[4]  outcome     str     commit | free | doubt
-- ARGV[5]  value       str     the result as JSON, empty when it is beyond the cap
-- ARGV[6]  value_map   map     value_digest, value_bytes, truncated
-- ARGV[7]  operation_id str    the outside system's name of the effect, may be empty
-- ARGV[8]  channel     str     where those listen who wait for the result
-- RETURNS {status}    "held" | "stale"
-- ERRORS  -
-- EXPIRES op_key: ledger_ttl_ms once finished
-- FLAGS   allow-oom
--@include pack
--@include clock
--@include hash
--@include ledger
--@bind

local now = clock.now(now_ms)
local op = hash.read(op_key)
local result = {
  value = value, value_digest = value_map.value_digest, value_bytes = value_map.value_bytes,
  truncated = value_map.truncated, operation_id = operation_id,
}
local status = ledger.report(op, owner, outcome, result, now)
ledger.wake(op, now, channel)
ledger.write(op, settings.ledger_ttl_ms)
return { status }
