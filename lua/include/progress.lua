-- progress: confirmed external change, and what it forgives (SPEC 2.4).
--
-- Marks carry the number of the progress or resume they belong to, so both
-- clear in O(1): raising the number makes every older mark void.
--@include num
--@include hash
local progress = {}

-- Forgets windows, empties, targets, replays and rounds; the handoff path of
-- the tree is cut to its last holder.
function progress.clear(c)
  local own, root = c.own, c.root
  hash.add(own, "progress_no", 1)
  hash.add(own, "round", 1)
  hash.drop(own, "recent")
  hash.drop(own, "no_progress")
  hash.drop(root, "tree_recent")
  if root.f.path then
    hash.set(root, "path", string.match(root.f.path, "(%S+)$"))
  end
end

-- A version named by open, before or after; true when it is progress.
function progress.take(c, version)
  if not version then return false end
  hash.set(c.own, "reports", "1")
  if version <= hash.int(c.own, "progress_version") then
    -- That a version was named is known from the field being there.
    if not c.own.f.progress_version then hash.set(c.own, "progress_version", version) end
    return false
  end
  hash.set(c.own, "progress_version", version)
  hash.set(c.own, "progress_ms", c.now)
  progress.clear(c)
  return true
end

-- The value that a tool rule reads from a result: true when it confirms
-- progress. mark: what is remembered of this tool and target, or nil.
-- Returns confirmed, new mark.
function progress.derive(mark, reading)
  if reading.when == "new" then
    if not mark then return false, reading.value end
    local seen = " " .. mark .. " "
    if string.find(seen, " " .. reading.value .. " ", 1, true) then return false, mark end
    local _, count = string.gsub(mark, "%S+", "")
    -- A full memory cannot tell what is new, so nothing is.
    if count >= tonumber(reading.seen_max) then return false, mark end
    return true, mark .. " " .. reading.value
  end
  if not mark then return false, reading.value end
  -- Values are order keys: text that sorts as the numbers do.
  local higher = reading.value > mark
  if reading.value ~= mark and higher == (reading.when == "increases") then return true, reading.value end
  return false, mark
end

return progress
