-- look: what a ledger record says now; a lease that is over puts it in doubt (SPEC 2.6).
--
-- KEYS[1]  op_key      hash    ledger record
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  wait_ms     int?    how long the caller waits for an owner that lives; empty: not at all
-- ARGV[3]  channel     str     where watchers listen
-- RETURNS {state, now, name, value, ...}    state "" when there is none; lapsed 1: its lease is over since this look
-- ERRORS  -
-- EXPIRES op_key: as it was
-- FLAGS   allow-oom
--@include num
--@include clock
--@include hash
--@include ledger
--@bind

local now = clock.now(now_ms)
local op = hash.read(op_key)
ledger.lapse(op, now, channel)
local reply = { op.f.state or "", num.text(now) }
if hash.is_changed(op) then reply[3], reply[4] = "lapsed", "1" end
ledger.await(op, now, wait_ms)
for _, name in ipairs({ "owner", "until_ms", "fp", "value", "value_digest", "value_bytes", "truncated",
  "operation_id", "run", "agent", "tool", "key", "scope" }) do
  if op.f[name] then reply[#reply + 1], reply[#reply + 2] = name, op.f[name] end
end
hash.write(op)
return reply
