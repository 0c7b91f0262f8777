-- open: make a run known, with its policy, limits and baseline (SPEC 2.10).
--
-- KEYS[1]  trace_key   stream  what happened
-- KEYS[2+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  defaults    str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  policy      str     named by the caller, may be empty
-- ARGV[8]  named       str     limits of the policy that is named, empty without one
-- ARGV[9]  changes     map     the caller's own limits, `-` for unlimited
-- ARGV[10] may_loosen  str     1: an operator asks
-- ARGV[11] version     int?    progress version to resume from
-- ARGV[12] labels      str     for search, may be empty
-- ARGV[13] tools       str     tools the agent has, may be empty
-- ARGV[14] known_epoch str     the life of the run that the caller knows, may be empty
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_RUN_LOST GUARD_NOT_ALLOWED
-- EXPIRES trace_key run_keys: run_ttl_ms
-- FLAGS   -
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include limits
--@include progress
--@include usage
--@include trace
--@include answer
--@bind

-- ---- Read ------------------------------------------------------------------
local now = clock.now(now_ms)
local birth = { record = birth_record, limits = defaults, known_epoch = known_epoch }
local c = chain.enter(run_keys, run, now, birth)
if c.lost then return redis.error_reply("GUARD_RUN_LOST the store does not know this run any more") end
if c.too_deep then return answer.say("deny", "handoff_depth", { limit = c.too_deep, observed = #run_keys - 1 }) end
local own = c.own

-- ---- Decide: the first open sets policy and limits -------------------------
local action, reason = chain.state(c)
local was = own and not c.made and own.f.limits
if own and own.f.opened ~= "1" and action ~= "stop" then
  local text = own.f.limits
  if named ~= "" then
    -- A sub-run tightens what its parent had when it was made (SPEC 1).
    text = own == c.root and named or limits.tighten(text, named)
  end
  if may_loosen ~= "1" then
    local name, most = limits.first_looser(text, changes)
    if name then
      return redis.error_reply("GUARD_NOT_ALLOWED only an operator may loosen a limit field=limits." .. name
        .. " value=" .. (changes[name] == "-" and "unlimited" or changes[name]) .. " limit=" .. (most or "unlimited"))
    end
  end
  hash.set(own, "limits", limits.merge(text, changes))
  if policy ~= "" then hash.set(own, "policy", policy) end
  hash.set(own, "opened", "1")
  if labels ~= "" then hash.set(own, "labels", labels) end
end
if own and tools ~= "" then hash.set(own, "tools", tools) end
if own and version and action == "continue" then
  if not own.f.progress_version then
    -- The first version a run hears of is the baseline of a resumed run.
    hash.set(own, "reports", "1")
    hash.set(own, "progress_version", version)
    if version > 0 then hash.set(own, "progress_ms", now) end
  else
    progress.take(c, version)
  end
end

-- ---- Write -----------------------------------------------------------------
trace.add(trace_key, settings, now, {
  op = "open", run = run, policy = own and own.f.policy, limits = own and own.f.limits,
  was = was and own.f.limits ~= was and was or nil, version = version and num.text(version),
  action = action, reason = reason,
})
chain.write(c, settings.run_ttl_ms, channel)
return answer.say(action, reason, answer.run(c, {
  policy = own and own.f.policy, limits = own and own.f.limits, remaining = own and usage.remaining(c),
  progress_version = own and own.f.progress_version, steps = own and own.f.steps,
}))
