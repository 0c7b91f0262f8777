-- resolve: an operator looked at the outside system and says what is true (SPEC 2.6).
--
-- KEYS[1]  op_key      hash    ledger record
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     ledger_ttl_ms
-- ARGV[3]  state       str     committed | not_executed
-- ARGV[4]  names       map     run, tool, scope (escaped), for a record that is made now
-- ARGV[5]  key         str     effect key
-- ARGV[6]  value       str     the result as JSON, may be empty
-- ARGV[7]  value_map   map     value_digest, value_bytes, truncated
-- ARGV[8]  operation_id str    the outside system's name of the effect, may be empty
-- ARGV[9]  note        str     why, may be empty
-- ARGV[10] channel     str     where those listen who wait for the result
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_IN_FLIGHT GUARD_ALREADY_COMMITTED GUARD_UNKNOWN_OPERATION
-- EXPIRES op_key: ledger_ttl_ms
-- FLAGS   allow-oom
--@include num
--@include pack
--@include clock
--@include hash
--@include ledger
--@include answer
--@bind

local now = clock.now(now_ms)
local op = hash.read(op_key)
local says, left_ms = ledger.look(op.f, op.f.fp, now)
if says == "claimed" then
  return redis.error_reply("GUARD_IN_FLIGHT its owner may still report field=idempotency_key limit=" .. num.text(left_ms) .. "ms")
elseif says == "committed" then
  return redis.error_reply("GUARD_ALREADY_COMMITTED the effect is known to have happened field=idempotency_key")
elseif says == "free" and state ~= "committed" then
  return redis.error_reply("GUARD_UNKNOWN_OPERATION no effect of this key is stored field=idempotency_key")
end
if says == "free" then
  hash.set(op, "run", pack.unescape(names.run))
  hash.set(op, "tool", pack.unescape(names.tool))
  hash.set(op, "scope", names.scope)
  hash.set(op, "key", key)
  for _, name in ipairs({ "fp", "owner", "reported" }) do hash.drop(op, name) end
end
hash.set(op, "state", state == "committed" and "committed" or "freed")
hash.set(op, "resolved_ms", now)
if note ~= "" then hash.set(op, "note", note) end
if state == "committed" then
  hash.set(op, "committed_ms", now)
  if value ~= "" then hash.set(op, "value", value) end
  for name, each in pairs(value_map) do hash.set(op, name, each) end
  if operation_id ~= "" then hash.set(op, "operation_id", operation_id) end
end
ledger.wake(op, now, channel)
ledger.write(op, settings.ledger_ttl_ms)
return answer.say("continue", "", { state = op.f.state })
