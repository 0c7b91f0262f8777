-- freeze: hold a run for a while; the scopes replace those before (SPEC 2.8).
--
-- KEYS[1]  trace_key   stream  what happened
-- KEYS[2+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  limits      str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  scope       str     comma list of retries, handoffs, subruns, effects, all
-- ARGV[8]  note        str     for the trace, may be empty
-- ARGV[9] known_epoch str     the life of the run that the caller knows, may be empty
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
local birth = { record = birth_record, limits = limits, known_epoch = known_epoch }
local c = chain.enter(run_keys, run, now, birth)
if c.lost then return redis.error_reply("GUARD_RUN_LOST the store does not know this run any more") end
if c.too_deep then return answer.say("deny", "handoff_depth", { limit = c.too_deep, observed = #run_keys - 1 }) end
if c.withheld then return answer.say("wait", "frozen", {}) end
local action, reason = "wait", "frozen"
local ended = chain.ended(c)
if ended then
  action, reason = "stop", ended
else
  hash.set(c.own, "freeze", scope)
  c.events[#c.events + 1] = "event=frozen run=" .. run .. " scope=" .. scope
end
trace.add(trace_key, settings, now, {
  op = "freeze", run = run, scope = scope, note = note, action = action, reason = reason,
})
chain.write(c, settings.run_ttl_ms, channel)
return answer.say(action, reason, answer.run(c, {}))
