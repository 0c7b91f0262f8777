-- withdraw: take an admission back that its caller never heard of (SPEC 2.6, 5).
--
-- The global claim was lost to another, or too few replicas have the write. A
-- grant that was answered once more since stays: its tool may be running.
-- The id stays known, so that its usage is not charged twice when the call is
-- judged again by what the record says now.
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
-- ARGV[6]  asked       int     how often the grant had been answered
-- RETURNS {status}    "withdrawn" | "unknown": the call is not in flight, or was answered again
-- ERRORS  -
-- EXPIRES calls_key trace_key marks_key run_keys: run_ttl_ms; op_key: ledger_ttl_ms once free
-- FLAGS   allow-oom
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include usage
--@include window
--@include marks
--@include calls
--@include ledger
--@include trace
--@bind

local now = clock.now(now_ms)
local c = chain.enter(run_keys, run, now, nil)
local call_field = "c:" .. call
local ids = c.own and calls.fetch(calls_key, c.root, call_field, tonumber(settings.calls_max))
local known = ids and calls.get(ids, call_field)
if not known or known.state ~= "open" or math.max(1, num.of(known.asked)) ~= asked then return { "unknown" } end
local op = known.scope == "run" and hash.read(op_key) or nil
if op then ledger.release(op, call) end
local own, agent = c.own, pack.unescape(known.agent)
local target = known.target and "g:" .. known.target or "g:"
local memory = hash.fetch(marks_key, { "f:" .. known.fp, target, "w:" .. agent })

local function without(text)
  local kept = {}
  for _, entry in ipairs(window.parse(text)) do
    if not (entry.step == known.step and entry.fp == known.fp) then kept[#kept + 1] = entry end
  end
  return window.format(kept)
end

for _, each in ipairs(c.runs) do hash.add(each, "steps", -1) end
usage.hold(c, known, -1)
if own.f.recent then hash.set(own, "recent", without(own.f.recent)) end
if c.root.f.tree_recent then hash.set(c.root, "tree_recent", without(c.root.f.tree_recent)) end
local progress_no = hash.int(own, "progress_no")
local text = marks.window(memory, agent, progress_no)
if text ~= "" then marks.set_window(memory, agent, without(text), progress_no) end
if known.target and known.retry ~= "1" then
  marks.set_count(memory, target, math.max(0, marks.count(memory, target, progress_no) - 1), progress_no)
end
local mark = marks.call(memory, known.fp, hash.int(own, "resume_no"))
mark.inflight = num.text(math.max(0, num.of(mark.inflight) - 1))
if known.retry == "1" then mark.retries = num.text(math.max(0, num.of(mark.retries) - 1)) end
marks.set_call(memory, known.fp, mark)

trace.add(trace_key, settings, now, { op = "withdraw", run = run, call = call })
calls.remember(ids, c.root, call_field, {
  state = "said", run = run, client = known.client, fp = known.fp, key = known.key, first = "wait",
})
if op then
  ledger.wake(op, now, channel)
  ledger.write(op, settings.ledger_ttl_ms)
end
hash.write(ids, settings.run_ttl_ms)
hash.write(memory, settings.run_ttl_ms)
chain.write(c, settings.run_ttl_ms, channel)
return { "withdrawn" }
