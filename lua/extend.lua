-- extend: keep the claim of a global effect while its tool runs (SPEC 2.6).
--
-- KEYS[1]  op_key      hash    ledger record of a global key
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  owner       str     call id
-- ARGV[3]  lease_ms    int     from now, > 0
-- RETURNS {status}    "renewed" | "stale"
-- ERRORS  -
-- EXPIRES op_key: never while claimed
-- FLAGS   allow-oom
--@include clock
--@include hash
--@include ledger
--@bind

local op = hash.read(op_key)
local status = ledger.renew(op, owner, clock.now(now_ms), lease_ms)
hash.write(op)
return { status }
