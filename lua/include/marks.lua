-- marks: what a run remembers of a fingerprint, tool, target, key or agent.
--
-- Fields of the `…:marks` hash, each a packed record:
--   f:<fingerprint>  inflight retries retry_at last refused at   (at: resume number of `refused`)
--   t:<tool>         empty at         g:<target>   count at      (at: progress number)
--   r:<record>       count at         w:<agent>    at window     (at: progress number)
--   s:<agent>        count at         (at: resume number)
--   v:<tool>:<target> values that derived progress has seen
-- A record whose number is not the run's current one is void.
--@include num
--@include pack
--@include hash
local marks = {}

local CALL_ORDER = { "inflight", "retries", "retry_at", "last", "refused", "at" }

function marks.count(h, name, number)
  local record = pack.parse(h.f[name])
  if num.of(record.at) ~= number then return 0 end
  return num.of(record.count)
end

function marks.set_count(h, name, count, number)
  if count == 0 then
    hash.drop(h, name)
  else
    hash.set(h, name, "count=" .. num.text(count) .. " at=" .. num.text(number))
  end
end

-- The record of a fingerprint; a refusal from before the last resume is void.
function marks.call(h, fp, resume_no)
  local record = pack.parse(h.f["f:" .. fp])
  if record.refused and num.of(record.at) ~= resume_no then
    record.refused, record.at = nil, nil
  end
  return record
end

function marks.set_call(h, fp, record)
  if num.of(record.inflight) == 0 then record.inflight = nil end
  if num.of(record.retries) == 0 then record.retries = nil end
  local text = pack.format(record, CALL_ORDER)
  if text == "" then hash.drop(h, "f:" .. fp) else hash.set(h, "f:" .. fp, text) end
end

-- Windows of scope `agent` (SPEC 2.2): text, "" when progress voided it.
function marks.window(h, agent, progress_no)
  local at, text = string.match(h.f["w:" .. agent] or "", "^at=(%d+) (.*)$")
  if num.of(at) ~= progress_no then return "" end
  return text or ""
end

function marks.set_window(h, agent, text, progress_no)
  hash.set(h, "w:" .. agent, "at=" .. num.text(progress_no) .. " " .. text)
end

return marks
