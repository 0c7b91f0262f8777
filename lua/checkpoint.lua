-- checkpoint: the last safe point of a run, for the envelope (SPEC 2.9).
--
-- KEYS[1]  trace_key   stream  what happened
-- KEYS[2+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  limits      str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  version     int     progress version that the point was saved at
-- ARGV[8]  ref         str     where it was saved, may be empty
-- ARGV[9] known_epoch str     the life of the run that the caller knows, may be empty
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_RUN_LOST
-- EXPIRES trace_key run_keys: run_ttl_ms
-- FLAGS   allow-oom
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include trace
--@include answer
--@bind

local now = clock.now(now_ms)
local birth = { record = birth_record, limits = limits, known_epoch = known_epoch }
local c = chain.enter(run_keys, run, now, birth)
if c.lost then return redis.error_reply("GUARD_RUN_LOST the store does not know this run any more") end
if c.too_deep then return answer.say("deny", "handoff_depth", { limit = c.too_deep, observed = #run_keys - 1 }) end
local action, reason = chain.state(c)
-- A late older point never replaces a newer one; naming one twice changes nothing.
if c.own and version >= hash.int(c.own, "checkpoint_version") then
  hash.set(c.own, "checkpoint_version", version)
  if ref ~= "" then hash.set(c.own, "checkpoint_ref", ref) else hash.drop(c.own, "checkpoint_ref") end
  hash.set(c.own, "checkpoint_ms", now)
end
trace.add(trace_key, settings, now, {
  op = "checkpoint", run = run, version = num.text(version), ref = ref, action = action, reason = reason,
})
chain.write(c, settings.run_ttl_ms, channel)
return answer.say(action, reason, answer.run(c, {}))
