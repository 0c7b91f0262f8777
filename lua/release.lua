-- release: take a global claim back that its caller never heard of (SPEC 2.6, 5).
--
-- KEYS[1]  op_key      hash    ledger record of a global key
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     ledger_ttl_ms
-- ARGV[3]  owner       str     call id
-- ARGV[4]  channel     str     where those listen who wait for the result
-- RETURNS {status}    "released" | "stale"
-- ERRORS  -
-- EXPIRES op_key: ledger_ttl_ms once free
-- FLAGS   allow-oom
--@include pack
--@include clock
--@include hash
--@include ledger
--@bind

local now = clock.now(now_ms)
local op = hash.read(op_key)
local status = ledger.release(op, owner)
ledger.wake(op, now, channel)
ledger.write(op, settings.ledger_ttl_ms)
return { status }
