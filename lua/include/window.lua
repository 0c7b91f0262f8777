-- window: the same call twice, and calls that go in a circle (SPEC 2.2 step 10).
--
-- A window is text, `step:fingerprint` separated by blanks, newest last;
-- `step~fingerprint` is an entry of a cycle-exempt tool: it counts as a repeat
-- but is no part of the history that cycles are looked for in.
local window = {}

function window.parse(text)
  local entries = {}
  for step, mark, fingerprint in string.gmatch(text or "", "(%d+)([:~])(%S+)") do
    entries[#entries + 1] = { step = step, fp = fingerprint, exempt = mark == "~" }
  end
  return entries
end

function window.format(entries)
  local parts = {}
  for i, entry in ipairs(entries) do
    parts[i] = entry.step .. (entry.exempt and "~" or ":") .. entry.fp
  end
  return table.concat(parts, " ")
end

-- How often `fp` is among the last `span` entries: returns count, steps.
function window.count(entries, fp, span)
  local count, steps = 0, {}
  for i = math.max(1, #entries - span + 1), #entries do
    if entries[i].fp == fp then
      count = count + 1
      steps[count] = entries[i].step
    end
  end
  return count, steps
end

-- Would `fp` close a circle? Looks for the smallest period n from 2 to
-- period_max whose last n entries, this one included, equal the n before and
-- are not all the same. Returns n and the steps of both blocks, or nil.
function window.cycle(entries, fp, period_max)
  local history = {}
  for _, entry in ipairs(entries) do
    if not entry.exempt then history[#history + 1] = entry end
  end
  history[#history + 1] = { fp = fp }
  local last = #history
  for n = 2, math.min(period_max, math.floor(last / 2)) do
    local same, varied = true, false
    for i = last - n + 1, last do
      if history[i].fp ~= history[i - n].fp then
        same = false
        break
      end
      if history[i].fp ~= fp then varied = true end
    end
    if same and varied then
      local steps = {}
      for i = last - 2 * n + 1, last - 1 do steps[#steps + 1] = history[i].step end
      return n, steps
    end
  end
  return nil
end

-- The window with the new entry, as text. Keeps the newest `span` entries, and
-- older ones of the history as far as the longest cycle needs them. Entries are
-- only taken apart once the text is twice as long as it needs to be: what is
-- beyond the span is never looked at, so when it goes makes no difference.
function window.push(text, step, fp, exempt, span, period_max)
  local entry = step .. (exempt and "~" or ":") .. fp
  if text ~= "" then text = text .. " " .. entry else text = entry end
  if #text <= 2 * (span + 2 * period_max) * (#entry + 1) then return text end
  local entries = window.parse(text)
  local kept, history = {}, 0
  for i = #entries, 1, -1 do
    local needed = not entries[i].exempt and history < 2 * period_max - 1
    if #entries - i < span or needed then
      kept[#kept + 1] = entries[i]
      if not entries[i].exempt then history = history + 1 end
    end
  end
  for i = 1, math.floor(#kept / 2) do
    kept[i], kept[#kept + 1 - i] = kept[#kept + 1 - i], kept[i]
  end
  return window.format(kept)
end

return window
