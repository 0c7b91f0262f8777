-- deny_rules: the emergency rules for all runs, and what time it is (SPEC 2.8).
--
-- KEYS[1]  deny_key    hash    rules as JSON, by id
-- RETURNS {now, id, rule, ...}
-- ERRORS  -
-- EXPIRES deny_key: never; a rule carries its own end
-- FLAGS   allow-oom
--@include num
--@include clock
--@bind

local reply = redis.call("HGETALL", deny_key)
table.insert(reply, 1, num.text(clock.now()))
return reply
