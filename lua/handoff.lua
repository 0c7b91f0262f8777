-- handoff: control goes from one agent to another; circles are refused (SPEC 2.7).
--
-- The path lives at the root: holders `agent:state`, newest last. New state is
-- new information and so another holder.
--
-- KEYS[1]  calls_key   hash    ids of the tree
-- KEYS[2]  trace_key   stream  what happened
-- KEYS[3]  marks_key   hash    what the run remembers
-- KEYS[4+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max, calls_max, holders_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  birth_record str    policy, epoch, rules: for a run that is made now
-- ARGV[5]  limits      str     the policy's limits, for a root that is made now
-- ARGV[6]  run         str     path
-- ARGV[7]  op_id       str     names this handoff over resends
-- ARGV[8]  giver       str     agent that gives
-- ARGV[9]  receiver    str     agent that gets
-- ARGV[10] state       str     digest of the state handed over
-- ARGV[11] known_epoch str     the life of the run that the caller knows, may be empty
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_CALL_CONFLICT GUARD_RUN_LOST
-- EXPIRES calls_key trace_key marks_key run_keys: run_ttl_ms
-- FLAGS   -
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include usage
--@include calls
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
local root, op_field = c.root, "o:" .. op_id
local ids = calls.fetch(calls_key, root, op_field, tonumber(settings.calls_max))
local known = calls.get(ids, op_field)
local holder = pack.escape(receiver) .. ":" .. state
if known and (known.run ~= run or known.tool ~= "handoff" or known.target ~= pack.escape(giver) .. ">" .. holder) then
  return redis.error_reply("GUARD_CALL_CONFLICT this op id already names another operation")
end
local memory = hash.fetch(marks_key, { "s:" .. giver })

-- ---- Decide ----------------------------------------------------------------
local holders = {}
for each in string.gmatch(root.f.path or "", "%S+") do holders[#holders + 1] = each end
if #holders == 0 then holders[1] = pack.escape(giver) .. ":" .. state end
local returns, role = 0, pack.escape(receiver) .. ":"
for _, each in ipairs(holders) do
  if string.sub(each, 1, #role) == role then returns = returns + 1 end
end
holders[#holders + 1] = holder

local function circle()
  for n = 2, math.floor(#holders / 2) do
    local same = true
    for i = #holders - n + 1, #holders do
      if holders[i] ~= holders[i - n] then
        same = false
        break
      end
    end
    if same then return n end
  end
  return nil
end

local action, reason, evidence = "continue", "", {}
local root_limits = chain.limits(c, root)
local is_observing = c.own and chain.limits(c, c.own).mode == "observe"

local function refuse(why, cap, seen)
  evidence = { rule = why, limit = cap and num.text(cap), observed = seen and num.text(seen), agent = giver }
  if is_observing then return end
  action, reason = "deny", why
  if streak.raise(c, memory, giver, why, evidence) then action = "stop" end
end

local ended, paused = chain.ended(c), chain.paused(c, { "all", "handoffs" })
local is_answered = known and (known.first == "continue" or known.first == "deny")
if ended then
  action, reason = "stop", ended
elseif paused then
  action, reason = "wait", paused
elseif is_answered then
  action, reason, evidence = known.first, known.reason or "", { limit = known.limit, observed = known.observed }
else
  local run_at_cap, cap_reason, cap, seen = usage.capped(c, false)
  local handoffs_max = tonumber(root_limits.max_handoffs or "")
  local returns_max = tonumber(root_limits.max_role_returns or "")
  local number, period = hash.int(root, "handoffs") + 1, circle()
  if run_at_cap and not is_observing then
    evidence = { rule = cap_reason, limit = num.text(cap), observed = num.text(seen) }
    chain.finish(c, run_at_cap, cap_reason, "cap", evidence)
    action, reason = "stop", chain.ended(c)
  elseif period then
    refuse("handoff_cycle", nil, period)
  elseif handoffs_max and number > handoffs_max then
    refuse("handoff_cap", handoffs_max, number)
  elseif returns_max and returns > returns_max then
    refuse("handoff_cap", returns_max, returns)
  end
  if action == "continue" then
    local holders_max = tonumber(settings.holders_max)
    hash.set(root, "path", table.concat(holders, " ", math.max(1, #holders - holders_max + 1)))
    hash.set(root, "handoffs", number)
  end
end

-- ---- Write -----------------------------------------------------------------
if action == "stop" and #c.events == 0 then
  hash.add(c.own or root, "stopped", 1)
else
  trace.add(trace_key, settings, now, {
    op = "handoff", run = run, call = op_id, agent = giver, to = receiver, state = state, action = action,
    reason = reason, limit = evidence.limit, observed = evidence.observed,
    would = is_observing and evidence.rule and "deny:" .. evidence.rule or "",
  })
end
if not is_answered then
  local record = known or { state = "said", run = run, tool = "handoff", target = pack.escape(giver) .. ">" .. holder }
  record.first, record.reason = action, reason ~= "" and reason or nil
  record.limit, record.observed = evidence.limit, evidence.observed
  if known then calls.set(ids, op_field, record) else calls.remember(ids, root, op_field, record) end
end
hash.write(memory, settings.run_ttl_ms)
chain.write(c, settings.run_ttl_ms, channel, ids)
return answer.say(action, reason, answer.run(c, {
  limit = evidence.limit, observed = evidence.observed, remaining = c.own and usage.remaining(c),
  handoffs = root.f.handoffs,
}))
