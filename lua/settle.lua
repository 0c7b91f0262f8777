-- settle: what a charge really used; its reservation is let go (SPEC 2.10).
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  trace_key   stream  what happened
-- KEYS[3+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max, calls_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  run         str     path
-- ARGV[5]  op_id       str     of the charge
-- ARGV[6]  usage_map   map     model_calls, tokens, cost_micros
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_UNKNOWN_OPERATION
-- EXPIRES calls_key trace_key run_keys: run_ttl_ms
-- FLAGS   allow-oom
--@include pack
--@include clock
--@include chain
--@include usage
--@include calls
--@include trace
--@include answer
--@bind

-- ---- Read ------------------------------------------------------------------
local now = clock.now(now_ms)
local c = chain.enter(run_keys, run, now, nil)
local op_field = "o:" .. op_id
local ids = c.own and calls.fetch(calls_key, c.root, op_field, tonumber(settings.calls_max))
local known = ids and calls.get(ids, op_field)
if not known or known.run ~= run or known.tool ~= "charge" or known.first ~= "continue" then
  return redis.error_reply("GUARD_UNKNOWN_OPERATION no charge of this op_id was granted in this run field=op_id")
end
local action, reason = chain.state(c)
if known.settled then
  local first, why = string.match(known.settled, "^(%w+):?(.*)$")
  return answer.say(first, why, answer.run(c, {}))
end

-- ---- Write -----------------------------------------------------------------
usage.charge(c, usage_map)
if known.state == "open" then usage.hold(c, known, -1) end
trace.add(trace_key, settings, now, {
  op = "settle", run = run, call = op_id, tokens = usage_map.tokens, model_calls = usage_map.model_calls,
  cost_micros = usage_map.cost_micros, action = action, reason = reason,
})
calls.write_unheld(ids, op_field, known, settings.run_ttl_ms)
local record = { state = "done", run = run, tool = "charge", first = "continue", slot = known.slot,
  settled = action .. (reason ~= "" and ":" .. reason or "") }
if record.slot then calls.set(ids, op_field, record) else calls.remember(ids, c.root, op_field, record) end
chain.write(c, settings.run_ttl_ms, channel, ids)
return answer.say(action, reason, answer.run(c, { remaining = usage.remaining(c) }))
