-- stop: end a run from outside, by a kill or a finish (SPEC 2.8).
--
-- Sub-runs need no word of their own: their next call looks up the chain.
--
-- KEYS[1]  trace_key   stream  what happened
-- KEYS[2+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  limits      str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  ended_by    str     kill | finish
-- ARGV[8]  why         str     the reason; the first one of a run stays
-- ARGV[9]  note        str     for the trace, may be empty
-- ARGV[10] known_epoch str     the life of the run that the caller knows, may be empty
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_RUN_LOST
-- EXPIRES trace_key run_keys: run_ttl_ms
-- FLAGS   allow-oom
--@include pack
--@include clock
--@include hash
--@include chain
--@include trace
--@include answer
--@bind

local now = clock.now(now_ms)
local birth = { record = birth_record, limits = limits, known_epoch = known_epoch, always = true }
local c = chain.enter(run_keys, run, now, birth)
if c.lost then return redis.error_reply("GUARD_RUN_LOST the store does not know this run any more") end
if c.too_deep then return answer.say("deny", "handoff_depth", { limit = c.too_deep, observed = #run_keys - 1 }) end
if not chain.ended(c) then
  if ended_by == "kill" then hash.set(c.own, "kill", why) end
  chain.finish(c, c.own, why, ended_by)
end
local reason = chain.ended(c)
trace.add(trace_key, settings, now, {
  op = ended_by, run = run, asked = why, note = note, action = "stop", reason = reason,
})
chain.write(c, settings.run_ttl_ms, channel)
return answer.say("stop", reason, answer.run(c, {}))
