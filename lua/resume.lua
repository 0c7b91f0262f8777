-- resume: an operator lets a run go on after a named change (SPEC 2.8).
--
-- What ended the run decides, not the word of its reason: a kill, a result or
-- a finish is final; a rule, a cap, a refusal or a framework's cap is not.
--
-- KEYS[1]  trace_key   stream  what happened
-- KEYS[2+] run_keys    hash    the run and its ancestors, root first
-- ARGV[1]  now_ms      int?    the virtual clock; empty: the server's
-- ARGV[2]  settings    map     run_ttl_ms, trace_max
-- ARGV[3]  channel     str     where watchers listen
-- ARGV[4]  run         str     path
-- ARGV[5]  change      str     what is different now
-- ARGV[6]  changes     map     limits to set, `-` for unlimited
-- ARGV[7]  note        str     for the trace, may be empty
-- RETURNS {action, reason, name, value, ...}
-- ERRORS  GUARD_UNKNOWN_RUN GUARD_NOT_RESUMABLE GUARD_LIMITS_NEEDED
-- EXPIRES trace_key run_keys: run_ttl_ms
-- FLAGS   allow-oom
--@include num
--@include pack
--@include clock
--@include hash
--@include chain
--@include limits
--@include usage
--@include progress
--@include trace
--@include answer
--@bind

-- ---- Read ------------------------------------------------------------------
local now = clock.now(now_ms)
local c = chain.enter(run_keys, run, now, nil)
local own = c.own
if not own then return redis.error_reply("GUARD_UNKNOWN_RUN no run of this name is stored field=run") end

-- ---- Decide ----------------------------------------------------------------
local was_ended, by = own.f.status == "ended", own.f.ended_by
local is_open_end = by == "rule" or by == "cap" or by == "refusal"
  or (by == "finish" and own.f.reason == "framework_cap")
if was_ended and not is_open_end then
  return redis.error_reply("GUARD_NOT_RESUMABLE ended by " .. by .. ": " .. own.f.reason .. "; start a new run")
end
for i = 1, #c.runs - 1 do
  if c.runs[i].f.status == "ended" then
    return redis.error_reply("GUARD_NOT_RESUMABLE its ancestor " .. c.runs[i].path .. " has ended: " .. c.runs[i].f.reason)
  end
end
local was = own.f.limits
if next(changes) ~= nil then hash.set(own, "limits", limits.merge(was, changes)) end
if was_ended then
  local capped, reason, cap, seen = usage.capped(c, true)
  if capped then
    return redis.error_reply("GUARD_LIMITS_NEEDED " .. reason .. " of " .. capped.path
      .. " is still reached: resume with a higher limit field=limits value=" .. num.text(seen) .. " limit=" .. num.text(cap))
  end
end
local was_only_frozen = own.f.status == "running" and (own.f.freeze or "") ~= ""
hash.drop(own, "freeze")
if not was_only_frozen then
  hash.set(own, "status", "running")
  for name in pairs(own.f) do
    if string.sub(name, 1, 5) == "stop_" then hash.drop(own, name) end
  end
  for _, name in ipairs({ "reason", "ended_by", "ended_ms", "stopped" }) do hash.drop(own, name) end
  progress.clear(c)
  hash.add(own, "resume_no", 1)
end
local action, reason = chain.state(c)

-- ---- Write -----------------------------------------------------------------
trace.add(trace_key, settings, now, {
  op = "resume", run = run, change = change, limits = next(changes) ~= nil and own.f.limits or nil,
  was = own.f.limits ~= was and was or nil, note = note, action = action, reason = reason,
})
c.events[#c.events + 1] = "event=resumed run=" .. run .. " change=" .. change
chain.write(c, settings.run_ttl_ms, channel)
return answer.say(action, reason, answer.run(c, { remaining = usage.remaining(c) }))
