-- chain: a run and its ancestors, root first (SPEC 1, 2.2, 2.8).
--
-- Missing ancestors are made root first; under an ended run nothing is made.
-- A kill or freeze that an operator wrote with redis-cli alone is seen here.
--
-- Time (SPEC 2.8): a run's clock stands still while the run or an ancestor is
-- frozen, waits or has ended. Each run therefore measures by its parent's
-- clock: `begun`, `paused_at` and `paused_ms` are readings of the parent's
-- elapsed time (of the wall clock for the root), so that pauses which overlap
-- along the chain count once.
--@include num
--@include pack
--@include hash
local chain = {}

local function is_paused(run)
  return run.f.status ~= "running" or pack.lists(run.f.freeze, "all")
end

-- Lets the pause clock follow the status; returns the run's elapsed ms.
local function tick(run, outer_ms)
  local since_ms = tonumber(run.f.paused_at or "")
  if is_paused(run) then
    if not since_ms then
      hash.set(run, "paused_at", outer_ms)
      since_ms = outer_ms
    end
  elseif since_ms then
    hash.add(run, "paused_ms", math.max(0, outer_ms - since_ms))
    hash.drop(run, "paused_at")
    since_ms = nil
  end
  local pause_ms = since_ms and math.max(0, outer_ms - since_ms) or 0
  run.elapsed_ms = math.max(0, outer_ms - hash.int(run, "begun") - hash.int(run, "paused_ms") - pause_ms)
  return run.elapsed_ms
end

-- The limits of a run as a record; runs of one tree mostly share one text.
function chain.limits(c, run)
  local text = run.f.limits or ""
  if not c.parsed[text] then c.parsed[text] = pack.parse(text) end
  return c.parsed[text]
end

local function make(c, run, parent, outer_ms, birth)
  hash.set(run, "status", "running")
  local given = pack.parse(birth.record)
  hash.set(run, "policy", parent and parent.f.policy or given.policy)
  hash.set(run, "limits", parent and parent.f.limits or birth.limits)
  hash.set(run, "epoch", given.epoch)
  hash.set(run, "steps", "0")
  hash.set(run, "started_ms", c.now)
  hash.set(run, "begun", outer_ms)
  if not parent then hash.set(run, "rules", given.rules) end
  c.made = true
end

-- Ends a run for its first reason; a later one never replaces it.
-- detail: what fired {limit, observed, steps} and the refused call, if any.
function chain.finish(c, run, reason, ended_by, detail)
  if run.f.status == "ended" then return end
  hash.set(run, "status", "ended")
  hash.set(run, "reason", reason)
  hash.set(run, "ended_by", ended_by)
  hash.set(run, "ended_ms", c.now)
  for name, value in pairs(detail or {}) do
    if value ~= "" then hash.set(run, "stop_" .. name, value) end
  end
  c.events[#c.events + 1] = "event=ended run=" .. run.path .. " reason=" .. reason .. " by=" .. ended_by
end

-- A reason typed by hand may be anything; a word that is none becomes `killed`.
local function kill_word(text)
  if #text <= 64 and string.find(text, "^[%w._:%-]+$") then return text end
  return "killed"
end

-- Reads the chain and makes what is missing.
--   keys   run keys, root first      path   the run's path
--   birth  {record, limits, known_epoch, always}, or nil: makes nothing; record is packed: policy, epoch, rules;
--          always: also under a freeze of new sub-runs (a kill must reach what is not there yet)
-- Returns c: runs (those that exist), own (nil: not made), too_deep (the
-- limit), withheld (true: a freeze of new sub-runs), lost (true: run_lost).
function chain.enter(keys, path, now, birth)
  local c = { runs = {}, now = now, parsed = {}, events = {}, made = false }
  local read, at = {}, ""
  local i = 0
  for segment in string.gmatch(path, "[^/]+") do
    i = i + 1
    at = i == 1 and segment or at .. "/" .. segment
    read[i] = hash.read(keys[i])
    read[i].path = at
    if i == 1 then
      -- Most runs are roots, and a root is never too deep.
      local text = #keys > 1 and (read[1].f.limits or birth and birth.limits)
      local depth_max = text and tonumber(string.match(text, "max_depth=(%d+)") or "")
      if depth_max and #keys - 1 > depth_max then
        c.too_deep = depth_max
        return c
      end
    end
  end
  c.root = read[1]
  local known_epoch = birth and birth.known_epoch or ""
  if known_epoch ~= "" and read[#keys].f.epoch ~= known_epoch then
    c.lost = true
    return c
  end
  local outer_ms, parent = now, nil
  for depth = 1, #keys do
    local run = read[depth]
    if not run.f.status then
      if not birth or chain.ended(c) then return c end
      for _, above in ipairs(birth.always and {} or c.runs) do
        if pack.lists(above.f.freeze, "subruns") then
          c.withheld = true
          return c
        end
      end
      make(c, run, parent, outer_ms, birth)
    end
    if run.f.kill and run.f.status ~= "ended" then
      chain.finish(c, run, kill_word(run.f.kill), "kill")
    end
    outer_ms, parent = tick(run, outer_ms), run
    c.runs[depth] = run
  end
  c.own = read[#keys]
  return c
end

-- The run's own terminal reason, else the nearest ancestor's; nil: none.
function chain.ended(c)
  for i = #c.runs, 1, -1 do
    if c.runs[i].f.status == "ended" then return c.runs[i].f.reason end
  end
  return nil
end

-- What makes this operation wait: `frozen` for one of the scopes, of the run
-- or an ancestor, else `human_required`; nil: nothing.
function chain.paused(c, scopes)
  if c.withheld then return "frozen" end
  for i = #c.runs, 1, -1 do
    for _, scope in ipairs(scopes) do
      if pack.lists(c.runs[i].f.freeze, scope) then return "frozen" end
    end
  end
  for i = #c.runs, 1, -1 do
    if c.runs[i].f.status == "waiting" then return "human_required" end
  end
  return nil
end

-- The state of a run as an answer: stop, wait or continue.
function chain.state(c)
  local reason = chain.ended(c)
  if reason then return "stop", reason end
  reason = chain.paused(c, { "all" })
  if reason then return "wait", reason end
  return "continue", ""
end

-- Writes the runs, then the ids, if any, and tells the watchers. The last words of every script.
function chain.write(c, ttl_ms, channel, ids)
  local outer_ms = c.now
  for _, run in ipairs(c.runs) do
    outer_ms = tick(run, outer_ms)
    if hash.is_changed(run) then
      hash.set(run, "last_ms", c.now)
      hash.write(run, ttl_ms)
    end
  end
  if ids then hash.write(ids, ttl_ms) end
  for _, event in ipairs(c.events) do
    redis.call("PUBLISH", channel, event)
  end
end

return chain
