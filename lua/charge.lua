-- charge: count or reserve the usage of a model call, before it is made (SPEC 2.10).
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  trace_key   stream  what happened
-- KEYS[3+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max, calls_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  limits      str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  op_id       str     names this charge over resends
-- ARGV[8]  usage_map   map     model_calls, tokens, cost_micros
-- ARGV[9]  reserve     map     the same, held until settled
-- ARGV[10] known_epoch str     the life of the run that the caller knows, may be empty
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_CALL_CONFLICT GUARD_RUN_LOST
-- EXPIRES calls_key trace_key run_keys: run_ttl_ms
-- FLAGS   -
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include usage
--@include calls
--@include trace
--@include answer
--@bind

-- ---- Read ------------------------------------------------------------------
local now = clock.now(now_ms)
local birth = { record = birth_record, limits = limits, known_epoch = known_epoch }
local c = chain.enter(run_keys, run, now, birth)
if c.lost then return redis.error_reply("GUARD_RUN_LOST the store does not know this run any more") end
if c.too_deep then return answer.say("deny", "handoff_depth", { limit = c.too_deep, observed = #run_keys - 1 }) end
local op_field = "o:" .. op_id
local ids = calls.fetch(calls_key, c.root, op_field, tonumber(settings.calls_max))
local known = calls.get(ids, op_field)
if known and (known.run ~= run or known.tool ~= "charge") then
  return redis.error_reply("GUARD_CALL_CONFLICT this op id already names another operation")
end

-- ---- Decide ----------------------------------------------------------------
local action, reason, evidence = "continue", "", {}
local is_answered = known and (known.first == "continue" or known.first == "deny")
if not known then usage.charge(c, usage_map) end
local ended, paused = chain.ended(c), chain.paused(c, { "all" })
if ended then
  action, reason = "stop", ended
elseif paused then
  action, reason = "wait", paused
elseif is_answered then
  action, reason, evidence = known.first, known.reason or "", { limit = known.limit, observed = known.observed }
else
  local rules = chain.limits(c, c.own)
  local run_at_cap, cap_reason, cap, seen = usage.capped(c, false)
  if run_at_cap and rules.mode ~= "observe" then
    evidence = { rule = cap_reason, limit = num.text(cap), observed = num.text(seen) }
    chain.finish(c, run_at_cap, cap_reason, "cap", evidence)
    action, reason = "stop", chain.ended(c)
  else
    cap_reason, cap, seen = usage.unfit(c, reserve)
    if cap_reason and rules.mode ~= "observe" then
      action, reason, evidence = "deny", cap_reason, { limit = num.text(cap), observed = num.text(seen) }
    else
      usage.hold(c, reserve, 1)
    end
  end
end

-- ---- Write -----------------------------------------------------------------
if action == "stop" and #c.events == 0 then
  hash.add(c.own or c.root, "stopped", 1)
else
  trace.add(trace_key, settings, now, {
    op = "charge", run = run, call = op_id, tokens = usage_map.tokens, model_calls = usage_map.model_calls,
    cost_micros = usage_map.cost_micros, reserve = usage.text(reserve), action = action, reason = reason, limit = evidence.limit,
    observed = evidence.observed,
  })
end
if not is_answered then
  local record = known or { run = run, tool = "charge" }
  record.first, record.reason = action, reason ~= "" and reason or nil
  record.limit, record.observed = evidence.limit, evidence.observed
  record.state = "said"
  if action == "continue" and next(reserve) ~= nil then
    -- A hold is never forgotten before it is settled.
    record.state = "open"
    record.model_calls, record.tokens, record.cost_micros = reserve.model_calls, reserve.tokens, reserve.cost_micros
  end
  if record.state == "said" and not record.slot then
    calls.remember(ids, c.root, op_field, record)
  else
    calls.set(ids, op_field, record)
  end
end
chain.write(c, settings.run_ttl_ms, channel, ids)
return answer.say(action, reason, answer.run(c, {
  limit = evidence.limit, observed = evidence.observed, remaining = c.own and usage.remaining(c),
}))
