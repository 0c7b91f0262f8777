-- before: may this call run now? The rules of SPEC 2.2, in their order.
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  trace_key   stream  what happened
-- KEYS[3]  marks_key   hash    what the run remembers
-- KEYS[4]  op_key      hash    ledger record of a run-scoped key; untouched without one
-- KEYS[5+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, ledger_ttl_ms, trace_max, calls_max, lease_ms
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  limits      str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  call        str     call id
-- ARGV[8]  client      str     instance that asks
-- ARGV[9]  agent       str     label, may be empty
-- ARGV[10] tool        str     canonical name
-- ARGV[11] fp          str     short fingerprint
-- ARGV[12] full_fp     str     full fingerprint
-- ARGV[13] target      str     coarse fingerprint, may be empty
-- ARGV[14] args        str     canonical arguments, redacted, for the trace
-- ARGV[15] key         str     effect key, may be empty
-- ARGV[16] effect      map     scope (run | global), digest; for global: what was seen {state, owner, until_ms, fp}
-- ARGV[17] rule        map     what the tool rule overrides: max_same_call, max_same_target, max_retries, max_empty, cycle_exempt, window_scope, reclaim, writes, span
-- ARGV[18] retry       str     the change a retry declares, may be empty
-- ARGV[19] version     int?    progress version
-- ARGV[20] usage_map   map     model_calls, tokens, cost_micros
-- ARGV[21] reserve     map     the same, held until the result
-- ARGV[22] deny_rule   str     id of the deny rule that matches, may be empty
-- ARGV[23] policy      str     the policy that the daemon judged by
-- ARGV[24] known_epoch str     the life of the run that the caller knows, may be empty
-- RETURNS {action, reason, name, value, ...}   or {"policy", name}: judge again under that policy
-- ERRORS  GUARD_CALL_CONFLICT GUARD_RUN_LOST
-- EXPIRES calls_key trace_key marks_key run_keys: run_ttl_ms; op_key: never while claimed or in doubt
-- FLAGS   -
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include usage
--@include window
--@include progress
--@include marks
--@include calls
--@include ledger
--@include streak
--@include trace
--@include answer
--@bind

-- ---- Read ------------------------------------------------------------------
local now = clock.now(now_ms)
local birth = { record = birth_record, limits = limits, known_epoch = known_epoch }
local c = chain.enter(run_keys, run, now, birth)
if c.lost then return redis.error_reply("GUARD_RUN_LOST the store does not know this run any more") end
if c.too_deep then return answer.say("deny", "handoff_depth", { limit = c.too_deep, observed = #run_keys - 1 }) end
local own = c.own
if own and own.f.policy ~= policy then return { "policy", own.f.policy } end

local call_field = "c:" .. call
local ids = calls.fetch(calls_key, c.root, call_field, tonumber(settings.calls_max))
local known = calls.get(ids, call_field)
local key_ref = key ~= "" and effect.digest or nil
local is_mine = known and known.client == client and known.state ~= "done"
if is_mine and (known.run ~= run or known.key ~= key_ref or known.fp ~= fp) then
  return redis.error_reply("GUARD_CALL_CONFLICT this call id already names another call")
elseif known and not is_mine and (known.run ~= run or not key_ref) then
  return redis.error_reply("GUARD_CALL_CONFLICT this call id belongs to another attempt")
end

local rules = own and chain.limits(c, own) or {}
local scope = rule.window_scope or rules.window_scope
local names = { "f:" .. fp, "t:" .. tool, "s:" .. agent }
if target ~= "" then names[#names + 1] = "g:" .. target end
if key_ref then names[#names + 1] = "r:" .. key_ref end
if scope == "agent" then names[#names + 1] = "w:" .. agent end
local memory = hash.fetch(marks_key, names)

local op
if key_ref and effect.scope == "run" then
  op = hash.read(op_key)
elseif key_ref then
  op = { key = op_key, f = effect, changed = {}, dropped = {} }
end

-- ---- Write and answer ------------------------------------------------------
local would = {}

-- extras: what the answer says by name; remember: how the id is kept (open | said | nil).
local function say(action, reason, extras, remember, record)
  if action == "stop" and #c.events == 0 then
    -- A caller that does not listen must not push the evidence out of the trace.
    hash.add(own or c.root, "stopped", 1)
  else
    trace.add(trace_key, settings, now, {
      op = "before", run = run, agent = agent, tool = tool, call = call, fp = full_fp, args = args, key = key,
      retry = retry, version = version and num.text(version), action = action, reason = reason,
      limit = extras.limit, observed = extras.observed, steps = extras.steps, would = table.concat(would, ","),
    })
  end
  if remember == "open" then
    calls.set(ids, call_field, record)
  elseif remember == "said" and not known then
    calls.remember(ids, c.root, call_field, {
      -- A deny rule's refusal is not remembered: the same id is judged again (SPEC 2.8).
      state = "said", run = run, client = client, fp = fp, key = key_ref,
      first = extras.deny_rule and "wait" or action, reason = reason,
      limit = extras.limit, observed = extras.observed, steps = extras.steps,
      counted = action == "replay" and "1" or nil,
    })
  elseif remember == "said" and is_mine and known.state == "said" then
    known.first, known.reason = extras.deny_rule and "wait" or action, reason
    if action == "replay" then known.counted = "1" end
    known.limit, known.observed, known.steps = extras.limit, extras.observed, extras.steps
    calls.set(ids, call_field, known)
  end
  extras.remaining, extras.would = own and usage.remaining(c), table.concat(would, ",")
  if op and effect.scope == "run" then ledger.write(op, settings.ledger_ttl_ms) end
  hash.write(memory, settings.run_ttl_ms)
  hash.write(ids, settings.run_ttl_ms)
  chain.write(c, settings.run_ttl_ms, channel)
  return answer.say(action, reason, answer.run(c, extras))
end

-- What the envelope says of the call that met the end.
local function with_call(detail)
  detail.tool, detail.agent, detail.call, detail.fp, detail.args = tool, agent, call, full_fp, args
  return detail
end

-- A refusal that counts in the streak; the one that fills it ends the run.
local function deny(reason, extras)
  for _, name in ipairs({ "limit", "observed" }) do
    if extras[name] then extras[name] = num.text(extras[name]) end
  end
  local ended = streak.raise(c, memory, agent, reason, with_call({
    rule = reason, limit = extras.limit, observed = extras.observed, steps = extras.steps,
  }))
  return say(ended and "stop" or "deny", reason, extras, "said")
end

-- In observe mode a rule is recorded and lets the call pass.
local is_observing = rules.mode == "observe"
local function observed(action, reason)
  if is_observing then would[#would + 1] = action .. ":" .. reason end
  return is_observing
end

local function replay_or_loop()
  local progress_no, mark = hash.int(own, "progress_no"), "r:" .. key_ref
  local count = marks.count(memory, mark, progress_no)
  local is_counted = is_mine and known.counted == "1"
  local cap = tonumber(rules.max_replays or "")
  if cap and not is_counted and count >= cap then
    return deny("same_call_repeat", { limit = cap, observed = count })
  end
  if not is_counted then marks.set_count(memory, mark, count + 1, progress_no) end
  local extras = {
    value = op.f.value, value_digest = op.f.value_digest, value_bytes = op.f.value_bytes,
    truncated = op.f.truncated, operation_id = op.f.operation_id,
  }
  return say("replay", "already_committed", extras, "said")
end

-- Step 8. Returns an answer, or nil when the key is free for this call.
local function ask_ledger()
  hash.set(ids, "e:" .. key_ref, effect.scope)
  local says, left_ms = ledger.look(op.f, full_fp, now)
  ledger.lapse(op, now)
  if says == "conflict" then return deny("key_conflict", {}) end
  if says == "committed" then return replay_or_loop() end
  if says == "claimed" then return say("wait", "in_flight", { retry_after_ms = left_ms }, "said") end
  if says == "in_doubt" and rule.reclaim ~= "1" then return deny("in_doubt", {}) end
  return nil
end

-- ---- 1 and 2: usage; an ended run; a deny rule -----------------------------
if not known then usage.charge(c, usage_map) end
local reason = chain.ended(c)
if reason then return say("stop", reason, {}, "said") end
if deny_rule ~= "" then return say("deny", "policy_blocked", { deny_rule = deny_rule }, "said") end

-- ---- 3: frozen, or waiting for a human --------------------------------------
local scopes = { "all" }
if retry ~= "" then scopes[#scopes + 1] = "retries" end
if key_ref or rule.writes == "1" then scopes[#scopes + 1] = "effects" end
reason = chain.paused(c, scopes)
if reason then return say("wait", reason, {}, "said") end

-- ---- A call id that is known: its first answer again ------------------------
if is_mine and known.state == "open" then
  local is_owner = op and op.f.owner == call and op.f.state == "claimed" and num.of(op.f.until_ms) > now
  if not key_ref or is_owner then return say("execute", "", { step = known.step }) end
  return ask_ledger() or redis.error_reply("GUARD_CALL_CONFLICT the key of this call was settled without it")
elseif is_mine and known.first == "deny" then
  return say("deny", known.reason, { limit = known.limit, observed = known.observed, steps = known.steps })
end

-- ---- 4: caps, reservation; then the version that came with the call ---------
local capped, cap_reason, cap, seen = usage.capped(c, true)
if capped and not observed("stop", cap_reason) then
  chain.finish(c, capped, cap_reason, "cap", with_call({ rule = cap_reason, limit = num.text(cap), observed = num.text(seen) }))
  return say("stop", chain.ended(c), { limit = num.text(cap), observed = num.text(seen), ended_run = capped.path }, "said")
end
cap_reason, cap, seen = usage.unfit(c, reserve)
if cap_reason and not observed("deny", cap_reason) then
  return say("deny", cap_reason, { limit = num.text(cap), observed = num.text(seen) }, "said")
end
progress.take(c, version)

if known and not is_mine then
  return ask_ledger() or redis.error_reply("GUARD_CALL_CONFLICT this call id belongs to another attempt")
end

-- ---- 5, 6, 7: refused before; too early; empty results in a row -------------
local progress_no, resume_no = hash.int(own, "progress_no"), hash.int(own, "resume_no")
local mark = marks.call(memory, fp, resume_no)
if mark.refused and not observed("deny", mark.refused) then return deny(mark.refused, {}) end

local wait_ms = num.of(mark.retry_at) - now
if wait_ms > 0 then return say("wait", "retry_too_early", { retry_after_ms = wait_ms }, "said") end

local empty_cap = tonumber(rule.max_empty or rules.max_empty or "")
local empties = marks.count(memory, "t:" .. tool, progress_no)
if empty_cap and empties >= empty_cap and not observed("deny", "empty_result") then
  return deny("empty_result", { limit = empty_cap, observed = empties })
end

-- ---- 8: the ledger ----------------------------------------------------------
if key_ref then
  local reply = ask_ledger()
  if reply then return reply end
end

-- ---- 9: a verified retry ----------------------------------------------------
local is_retry = retry ~= "" and (mark.last ~= nil or num.of(mark.inflight) > 0)
local retry_cap = tonumber(rule.max_retries or rules.max_retries or "")
if is_retry and retry_cap and num.of(mark.retries) >= retry_cap and not observed("deny", "retry_cap") then
  return deny("retry_cap", { limit = retry_cap, observed = num.of(mark.retries) })
end

-- ---- 10: repeats and cycles -------------------------------------------------
local holder_text
if scope == "agent" then
  holder_text = marks.window(memory, agent, progress_no)
elseif scope == "tree" then
  holder_text = c.root.f.tree_recent
else
  holder_text = own.f.recent
end
local entries = window.parse(holder_text)
local same_cap = tonumber(rule.max_same_call or rules.max_same_call or "")
local span = math.max(num.of(rules.cycle_window), same_cap or 0)
local period_max = num.of(rules.max_cycle_period)
if not is_retry then
  local count, steps = window.count(entries, fp, span)
  if same_cap and count >= same_cap and not observed("deny", "same_call_repeat") then
    return deny("same_call_repeat", { limit = same_cap, observed = count, steps = table.concat(steps, ",") })
  end
  local target_cap = tonumber(rule.max_same_target or rules.max_same_target or "")
  local targets = target ~= "" and marks.count(memory, "g:" .. target, progress_no) or 0
  if target ~= "" and target_cap and targets >= target_cap and not observed("deny", "same_target_repeat") then
    return deny("same_target_repeat", { limit = target_cap, observed = targets })
  end
  if rule.cycle_exempt ~= "1" then
    local period, cycle_steps = window.cycle(entries, fp, period_max)
    if period and not observed("deny", "short_cycle") then
      return deny("short_cycle", { limit = period_max, observed = period, steps = table.concat(cycle_steps, ",") })
    end
  end
  if target ~= "" then marks.set_count(memory, "g:" .. target, targets + 1, progress_no) end
end

-- ---- 11: admit --------------------------------------------------------------
for _, each in ipairs(c.runs) do hash.add(each, "steps", 1) end
local step = own.f.steps
if not is_retry then
  span = math.max(span, num.of(rules.max_same_call), num.of(rule.span))
  local text = window.format(window.push(entries, step, fp, rule.cycle_exempt == "1", span, period_max))
  if scope == "agent" then
    marks.set_window(memory, agent, text, progress_no)
  elseif scope == "tree" then
    hash.set(c.root, "tree_recent", text)
  else
    hash.set(own, "recent", text)
  end
end
usage.hold(c, reserve, 1)
if op and effect.scope == "run" then
  ledger.claim(op, { owner = call, run = run, agent = agent, tool = tool, key = key, scope = "run", fp = full_fp },
    now, tonumber(settings.lease_ms))
end
mark.inflight = num.text(num.of(mark.inflight) + 1)
if is_retry then mark.retries = num.text(num.of(mark.retries) + 1) end
marks.set_call(memory, fp, mark)
streak.clear(memory, agent)
local record = {
  state = "open", run = run, client = client, fp = fp, key = key_ref, first = "execute", tool = pack.escape(tool),
  target = target, agent = pack.escape(agent), step = step, round = own.f.round, started = num.text(now),
  retry = is_retry and "1" or nil, scope = key_ref and effect.scope,
  model_calls = reserve.model_calls, tokens = reserve.tokens, cost_micros = reserve.cost_micros,
}
return say("execute", "", { step = step }, "open", record)
