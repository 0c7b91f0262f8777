-- before: may this call run now? The rules of SPEC 2.2, in their order.
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  trace_key   stream  what happened
-- KEYS[3]  marks_key   hash    what the run remembers
-- KEYS[4]  op_key      hash    ledger record of a run-scoped key; untouched without one
-- KEYS[5+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, ledger_ttl_ms, trace_max, calls_max
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
-- ARGV[16] effect      map     scope (run | global), digest, wait_ms; for global: what was seen {state, owner, until_ms, fp}
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

-- ---- What the ledger would answer, should it be asked (step 8) ---------------
local progress_no, resume_no = own and hash.int(own, "progress_no"), own and hash.int(own, "resume_no")
local ledger_action, ledger_reason, lease_left_ms, replays
if key_ref and own then
  local says, left_ms = ledger.look(op.f, full_fp, now)
  -- A claim of this very call, which was never admitted: it was cut short and nobody heard of it, so it goes on.
  local is_unadmitted = not known or (is_mine and known.state == "said")
  if says == "conflict" then
    ledger_action, ledger_reason = "deny", "key_conflict"
  elseif says == "committed" then
    ledger_action, ledger_reason, replays = "replay", "already_committed", marks.count(memory, "r:" .. key_ref, progress_no)
    local cap = tonumber(rules.max_replays or "")
    if is_mine and known.counted == "1" then
      replays = nil
    elseif cap and replays >= cap then
      ledger_action, ledger_reason = "deny", "same_call_repeat"
    end
  elseif says == "claimed" and not (is_unadmitted and effect.scope == "run" and op.f.owner == call and op.f.run == run) then
    ledger_action, ledger_reason, lease_left_ms = "wait", "in_flight", left_ms
  elseif says == "unknown" or (says == "in_doubt" and rule.reclaim ~= "1") then
    ledger_action, ledger_reason = "deny", "in_doubt"
  end
end

-- ---- Decide: the first rule that matches breaks out --------------------------
local action, reason, extras = nil, "", {}
local is_counted, is_asked, is_known_answer, is_retry = false, false, false, false
local mark, entries, window_text, targets, span, capped
local would = ""
local is_observing = rules.mode == "observe"

repeat
  -- 1 and 2: usage; an ended run; a deny rule
  if not known then usage.charge(c, usage_map) end
  local why = chain.ended(c)
  if why then
    action, reason = "stop", why
    break
  end
  if deny_rule ~= "" then
    action, reason, extras.deny_rule = "deny", "policy_blocked", deny_rule
    break
  end

  -- 3: frozen, or waiting for a person
  local scopes = { "all" }
  if retry ~= "" then scopes[#scopes + 1] = "retries" end
  if key_ref or rule.writes == "1" then scopes[#scopes + 1] = "effects" end
  why = chain.paused(c, scopes)
  if why then
    action, reason = "wait", why
    break
  end

  -- A call id that is known: its first answer again, unless the ledger knows better
  if is_mine and known.state == "open" then
    local is_owner = op and op.f.owner == call and op.f.state == "claimed" and num.of(op.f.until_ms) > now
    -- A global key that was not claimed yet: the daemon died between admission and claim; the claim decides.
    if op and effect.scope == "global" and not op.f.state then is_owner = true end
    if not key_ref or is_owner then
      -- How often the grant was answered: one that was heard of is never withdrawn.
      known.asked = num.text(math.max(1, num.of(known.asked)) + 1)
      calls.set(ids, call_field, known)
      action, extras.step, extras.asked, is_known_answer = "execute", known.step, known.asked, true
      if op and effect.scope == "run" then extras.lease_ms = num.of(op.f.until_ms) - now end
    else
      is_asked = true
    end
    break
  elseif is_mine and known.first == "deny" then
    action, reason, is_known_answer = "deny", known.reason, true
    extras.limit, extras.observed, extras.steps = known.limit, known.observed, known.steps
    break
  end

  -- 4: caps, reservation; then the version that came with the call
  local run_at_cap, cap_reason, cap, seen = usage.capped(c, true)
  if run_at_cap then
    if not is_observing then
      action, reason, extras.limit, extras.observed = "stop", cap_reason, cap, seen
      capped = run_at_cap
      break
    end
    would = would .. ",stop:" .. cap_reason
  end
  cap_reason, cap, seen = usage.unfit(c, reserve)
  if cap_reason then
    if not is_observing then
      action, reason, extras.limit, extras.observed = "deny", cap_reason, cap, seen
      break
    end
    would = would .. ",deny:" .. cap_reason
  end
  if progress.take(c, version) then
    progress_no = hash.int(own, "progress_no")
    if replays then
      replays = 0
      if num.of(rules.max_replays or "1") > 0 then ledger_action, ledger_reason = "replay", "already_committed" end
    end
  end
  if known and not is_mine then
    is_asked = true
    break
  end

  -- 5, 6, 7: refused before; too early; empty results in a row
  mark = marks.call(memory, fp, resume_no)
  if mark.refused then
    if not is_observing then
      action, reason, is_counted = "deny", mark.refused, true
      break
    end
    would = would .. ",deny:" .. mark.refused
  end
  local wait_ms = num.of(mark.retry_at) - now
  if wait_ms > 0 then
    action, reason, extras.retry_after_ms = "wait", "retry_too_early", wait_ms
    break
  end
  cap = tonumber(rule.max_empty or rules.max_empty or "")
  seen = cap and marks.count(memory, "t:" .. tool, progress_no)
  if cap and seen >= cap then
    if not is_observing then
      action, reason, extras.limit, extras.observed, is_counted = "deny", "empty_result", cap, seen, true
      break
    end
    would = would .. ",deny:empty_result"
  end

  -- 8: the ledger
  if key_ref then hash.set(ids, "e:" .. key_ref, effect.scope) end
  if ledger_action then
    is_asked = true
    break
  end

  -- 9: a verified retry
  is_retry = retry ~= "" and (mark.last ~= nil or num.of(mark.inflight) > 0)
  cap = tonumber(rule.max_retries or rules.max_retries or "")
  if is_retry and cap and num.of(mark.retries) >= cap then
    if not is_observing then
      action, reason, extras.limit, extras.observed, is_counted = "deny", "retry_cap", cap, num.of(mark.retries), true
      break
    end
    would = would .. ",deny:retry_cap"
  end

  -- 10: repeats and cycles; a call that is not in the window at all can be neither
  if scope == "agent" then
    window_text = marks.window(memory, agent, progress_no)
  elseif scope == "tree" then
    window_text = c.root.f.tree_recent or ""
  else
    window_text = own.f.recent or ""
  end
  local same_cap = tonumber(rule.max_same_call or rules.max_same_call or "")
  span = math.max(num.of(rules.cycle_window), same_cap or 0)
  if is_retry then break end
  local is_in_window = string.find(window_text, fp, 1, true) ~= nil
  if is_in_window or same_cap == 0 then
    entries = window.parse(window_text)
    local count, steps = window.count(entries, fp, span)
    if same_cap and count >= same_cap then
      if not is_observing then
        action, reason, extras.limit, extras.observed, is_counted = "deny", "same_call_repeat", same_cap, count, true
        extras.steps = table.concat(steps, ",")
        break
      end
      would = would .. ",deny:same_call_repeat"
    end
  end
  if target ~= "" then
    targets = marks.count(memory, "g:" .. target, progress_no)
    cap = tonumber(rule.max_same_target or rules.max_same_target or "")
    if cap and targets >= cap then
      if not is_observing then
        action, reason, extras.limit, extras.observed, is_counted = "deny", "same_target_repeat", cap, targets, true
        break
      end
      would = would .. ",deny:same_target_repeat"
    end
  end
  if is_in_window and rule.cycle_exempt ~= "1" then
    local period, steps = window.cycle(entries, fp, num.of(rules.max_cycle_period))
    if period then
      if not is_observing then
        action, reason, extras.observed, is_counted = "deny", "short_cycle", period, true
        extras.limit, extras.steps = rules.max_cycle_period, table.concat(steps, ",")
        break
      end
      would = would .. ",deny:short_cycle"
    end
  end
until true

if is_asked then
  action, reason, is_counted = ledger_action, ledger_reason, ledger_action == "deny"
  if not action then
    return redis.error_reply("GUARD_CALL_CONFLICT the key of this call was settled without it, or the id is another's")
  end
  if key_ref then hash.set(ids, "e:" .. key_ref, effect.scope) end
  ledger.lapse(op, now, effect.scope == "run" and channel or nil)
  if effect.scope == "run" then ledger.await(op, now, tonumber(effect.wait_ms or "")) end
  extras.retry_after_ms = lease_left_ms
  if reason == "same_call_repeat" then
    extras.limit, extras.observed = rules.max_replays, replays
  elseif action == "replay" then
    if replays then marks.set_count(memory, "r:" .. key_ref, replays + 1, progress_no) end
    extras.value, extras.value_digest, extras.value_bytes = op.f.value, op.f.value_digest, op.f.value_bytes
    extras.truncated, extras.operation_id = op.f.truncated, op.f.operation_id
  end
end
for _, name in ipairs({ "limit", "observed" }) do
  if type(extras[name]) == "number" then extras[name] = num.text(extras[name]) end
end

-- ---- A refusal counts; too many in a row, or a cap, end the run ---------------
if is_counted and is_mine and known.struck == "1" then
  -- A resend of one attempt counts once, however often it is refused (SPEC 2.2).
  is_counted = false
elseif is_counted and is_mine and known.state == "open" then
  known.struck = "1"
  calls.set(ids, call_field, known)
end
if is_counted or capped then
  local detail = {
    rule = reason, limit = extras.limit, observed = extras.observed, steps = extras.steps,
    tool = tool, agent = agent, call = call, fp = full_fp, args = args,
  }
  if capped then
    chain.finish(c, capped, reason, "cap", detail)
    extras.ended_run = capped.path
  elseif streak.raise(c, memory, agent, reason, detail) then
    action = "stop"
  end
end

-- ---- 11: admit --------------------------------------------------------------
local record
if not action then
  action = "execute"
  for _, each in ipairs(c.runs) do hash.add(each, "steps", 1) end
  local step = own.f.steps
  extras.step = step
  if not is_retry then
    span = math.max(span, num.of(rules.max_same_call), num.of(rule.span))
    local text = window.push(window_text, step, fp, rule.cycle_exempt == "1", span, num.of(rules.max_cycle_period))
    if scope == "agent" then
      marks.set_window(memory, agent, text, progress_no)
    elseif scope == "tree" then
      hash.set(c.root, "tree_recent", text)
    else
      hash.set(own, "recent", text)
    end
    if targets then marks.set_count(memory, "g:" .. target, targets + 1, progress_no) end
  end
  usage.hold(c, reserve, 1)
  if op and effect.scope == "run" then
    ledger.claim(op, { owner = call, run = run, agent = agent, tool = tool, key = key, scope = "run", fp = full_fp },
      now, num.of(rules.claim_lease_ms))
    extras.lease_ms = rules.claim_lease_ms
  end
  mark.inflight = num.text(num.of(mark.inflight) + 1)
  if is_retry then mark.retries = num.text(num.of(mark.retries) + 1) end
  marks.set_call(memory, fp, mark)
  streak.clear(memory, agent)
  record = {
    state = "open", run = run, client = client, fp = fp, key = key_ref, first = "execute", tool = pack.escape(tool),
    target = target, agent = pack.escape(agent), step = step, round = own.f.round, started = num.text(now),
    retry = is_retry and "1" or nil, scope = key_ref and effect.scope,
    model_calls = reserve.model_calls, tokens = reserve.tokens, cost_micros = reserve.cost_micros,
  }
end

-- ---- Write ------------------------------------------------------------------
if would ~= "" then extras.would = string.sub(would, 2) end
if action == "stop" and #c.events == 0 then
  -- A caller that does not listen must not push the evidence out of the trace.
  hash.add(own or c.root, "stopped", 1)
else
  trace.add(trace_key, settings, now, {
    op = "before", run = run, agent = agent, tool = tool, call = call, fp = full_fp, args = args, target = target,
    key = key, scope = key_ref and effect.scope == "global" and "global" or nil, retry = retry,
    model_calls = usage_map.model_calls, tokens = usage_map.tokens, cost_micros = usage_map.cost_micros,
    reserve = usage.text(reserve), version = version and num.text(version), action = action, reason = reason,
    step = not is_known_answer and extras.step or nil, limit = extras.limit, observed = extras.observed,
    steps = extras.steps, would = extras.would,
  })
end
-- A deny rule's refusal is not remembered: the same id is judged again (SPEC 2.8).
local first = extras.deny_rule and "wait" or action
if record then
  calls.set(ids, call_field, record)
elseif not is_known_answer and (not known or (is_mine and known.state == "said")) then
  local said = known or { state = "said", run = run, client = client, fp = fp, key = key_ref }
  said.first, said.reason = first, reason
  said.limit, said.observed, said.steps = extras.limit, extras.observed, extras.steps
  if action == "replay" then said.counted = "1" end
  if known then calls.set(ids, call_field, said) else calls.remember(ids, c.root, call_field, said) end
end
extras.remaining = own and usage.remaining(c)
if op and effect.scope == "run" then ledger.write(op, settings.ledger_ttl_ms) end
hash.write(memory, settings.run_ttl_ms)
chain.write(c, settings.run_ttl_ms, channel, ids)
return answer.say(action, reason, answer.run(c, extras))
