-- after: what became of an admitted call (SPEC 2.3).
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  trace_key   stream  what happened
-- KEYS[3]  marks_key   hash    what the run remembers
-- KEYS[4]  op_key      hash    ledger record of a run-scoped key; untouched without one
-- KEYS[5+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, ledger_ttl_ms, trace_max, calls_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  run         str     path
-- ARGV[5]  call        str     call id
-- ARGV[6]  tool        str     the tool the daemon judged the result by; another one: it is told
-- ARGV[7]  op_digest   str     the ledger record the daemon passed, may be empty
-- ARGV[8]  status      str     SPEC 2.3
-- ARGV[9]  verdict     str     ok | empty | invalid: what the value is worth
-- ARGV[10] committed   str     1 | 0 | empty: not said
-- ARGV[11] version     int?    progress version
-- ARGV[12] retry_ms    int?    from now
-- ARGV[13] reading     map     when, value, seen_max: derived progress
-- ARGV[14] is_exempt   str     1: makes no round of no progress
-- ARGV[15] usage_map   map     model_calls, tokens, cost_micros
-- ARGV[16] value       str     the result as JSON, empty when it is beyond the cap
-- ARGV[17] value_map   map     value_digest, value_bytes, truncated
-- ARGV[18] operation_id str    the outside system's name of the effect
-- ARGV[19] global_claim str    held | stale: what the global record said; empty: not asked yet
-- RETURNS {action, reason, name, value, ...}   or {"call", tool, digest, scope}: judge by this call
--         or {"global", outcome}: report to the global record first
-- ERRORS  GUARD_UNKNOWN_CALL
-- EXPIRES calls_key trace_key marks_key run_keys: run_ttl_ms; op_key: ledger_ttl_ms once finished
-- FLAGS   allow-oom
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include usage
--@include progress
--@include marks
--@include calls
--@include ledger
--@include trace
--@include answer
--@bind

-- ---- Read ------------------------------------------------------------------
local now = clock.now(now_ms)
local c = chain.enter(run_keys, run, now, nil)
local own, root = c.own, c.root
if not own then return redis.error_reply("GUARD_UNKNOWN_CALL this run has admitted no such call") end
local call_field = "c:" .. call
local ids = calls.fetch(calls_key, root, call_field, tonumber(settings.calls_max))
local known = calls.get(ids, call_field)
if not known or known.run ~= run or known.state == "said" then
  return redis.error_reply("GUARD_UNKNOWN_CALL this run has admitted no such call")
end
if known.state == "done" then
  return answer.say(known.first, known.reason, answer.run(c, { claim = known.claim }))
end
if pack.escape(tool) ~= known.tool or op_digest ~= (known.key or "") then
  return { "call", pack.unescape(known.tool), known.key or "", known.scope or "" }
end
local is_success = (status == "progress" or status == "complete") and verdict == "ok"
local outcome = ledger.outcome(status, committed, is_success)
if known.scope == "global" and global_claim == "" then return { "global", outcome } end

local target_field = "v:" .. tool .. ":" .. (known.target or "")
local memory = hash.fetch(marks_key, { "f:" .. known.fp, "t:" .. tool, target_field })
local op = known.scope == "run" and hash.read(op_key) or nil
local limits = chain.limits(c, own)

-- ---- Decide: usage, ledger -------------------------------------------------
usage.charge(c, usage_map)
usage.hold(c, known, -1)
local claim
if known.scope == "global" then
  claim = global_claim
elseif op then
  local result = {
    value = value, value_digest = value_map.value_digest, value_bytes = value_map.value_bytes,
    truncated = value_map.truncated, operation_id = operation_id,
  }
  claim = ledger.report(op, call, outcome, result, now)
end

-- ---- Progress --------------------------------------------------------------
local is_blank = (status == "progress" or status == "complete") and not is_success
local moved = not is_blank and progress.take(c, version) or false
local was_admitted_since = num.of(known.round) == hash.int(own, "round")
if is_success and reading.value then
  hash.set(own, "reports", "1")
  local confirmed, seen = progress.derive(memory.f[target_field], reading)
  hash.set(memory, target_field, seen)
  if confirmed then
    progress.clear(c)
    moved = true
  end
end

-- ---- What is remembered of the tool and of the fingerprint -----------------
local progress_no, resume_no = hash.int(own, "progress_no"), hash.int(own, "resume_no")
if is_blank then
  marks.set_count(memory, "t:" .. tool, marks.count(memory, "t:" .. tool, progress_no) + 1, progress_no)
elseif is_success then
  marks.set_count(memory, "t:" .. tool, 0, progress_no)
end
local is_refusal = status == "permission_denied" or status == "policy_blocked"
local mark = marks.call(memory, known.fp, resume_no)
mark.inflight = num.text(math.max(0, num.of(mark.inflight) - 1))
mark.last, mark.retry_at = nil, nil
if is_success then
  mark.retries = nil
elseif is_blank then
  mark.last = verdict
elseif status == "retryable" then
  mark.last = "retryable"
  if retry_ms then mark.retry_at = num.text(now + retry_ms) end
elseif status == "invalid_input" or (is_refusal and limits.on_refusal == "deny") then
  mark.refused, mark.at = status, num.text(resume_no)
end
marks.set_call(memory, known.fp, mark)

-- ---- The end of the run, a pause, or a round without progress --------------
local ended = chain.ended(c)
if not ended then
  if status == "complete" and is_success then
    chain.finish(c, own, "complete", "result")
  elseif status == "fatal" then
    chain.finish(c, own, "fatal", "result", { rule = "fatal", tool = tool, call = call })
  elseif is_refusal and limits.on_refusal ~= "deny" then
    chain.finish(c, own, status, "refusal", { rule = status, tool = tool, call = call })
  elseif status == "human_required" then
    hash.set(own, "status", "waiting")
    c.events[#c.events + 1] = "event=waiting run=" .. own.path .. " reason=human_required"
  elseif own.f.reports == "1" and not moved and was_admitted_since and is_exempt ~= "1"
    and not (status == "retryable" and known.retry == "1") then
    hash.add(own, "no_progress", 1)
    hash.add(own, "round", 1)
    local cap, rounds = tonumber(limits.max_no_progress or ""), hash.int(own, "no_progress")
    if cap and rounds >= cap then
      if limits.mode == "observe" then
        hash.set(own, "would", "stop:no_progress")
      else
        chain.finish(c, own, "no_progress", "rule", {
          rule = "no_progress", limit = num.text(cap), observed = num.text(rounds), tool = tool, call = call,
        })
      end
    end
  end
end
local action, reason = chain.state(c)
if action == "continue" and is_blank then reason = verdict .. "_result" end

-- ---- Write -----------------------------------------------------------------
trace.add(trace_key, settings, now, {
  op = "after", run = run, agent = pack.unescape(known.agent), tool = tool, call = call,
  status = status, verdict = verdict ~= "ok" and verdict or "", version = version and num.text(version),
  model_calls = usage_map.model_calls, tokens = usage_map.tokens, cost_micros = usage_map.cost_micros,
  retry_ms = retry_ms and num.text(retry_ms), moved = moved and "1" or "", rounds = own.f.no_progress, digest = string.sub(value_map.value_digest or "", 1, 32),
  bytes = value_map.value_bytes, duration_ms = num.text(math.max(0, now - num.of(known.started))),
  outcome = claim and outcome, claim = claim, operation_id = operation_id, action = action, reason = reason,
})
calls.write_unheld(ids, call_field, known, settings.run_ttl_ms)
calls.remember(ids, root, call_field, {
  state = "done", run = run, first = action, reason = reason ~= "" and reason or nil,
  claim = claim == "stale" and "stale" or nil,
})
if op then
  ledger.wake(op, now, channel)
  ledger.write(op, settings.ledger_ttl_ms)
end
hash.write(memory, settings.run_ttl_ms)
chain.write(c, settings.run_ttl_ms, channel, ids)
return answer.say(action, reason, answer.run(c, {
  claim = claim == "stale" and "stale" or "", remaining = usage.remaining(c),
}))
