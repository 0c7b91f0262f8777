-- calls: what a tree remembers of its call and op ids (SPEC 2.2, call ids).
--
-- Fields of the `…:calls` hash: `c:<call id>` and `o:<op id>` are packed
-- records, `@<n>` a ring of the ids that were answered, newest calls_max of
-- them; what is in flight is never forgotten. `e:<digest>` names a ledger
-- record of the tree, with its scope.
--@include num
--@include pack
--@include hash
local calls = {}

-- state: open (admitted, no result yet) | done (reported) | said (answered only)
local ORDER = {
  "state", "run", "client", "fp", "key", "first", "reason", "limit", "observed", "steps", "counted", "struck",
  "tool", "target", "agent", "scope", "op", "asked", "step", "round", "retry", "started",
  "model_calls", "tokens", "cost_micros", "claim", "settled", "slot",
}

-- Reads the fields a script needs in one go: the id and the ring's next slot.
function calls.fetch(key, root, id, calls_max)
  local slot = "@" .. num.text(hash.int(root, "answered") % calls_max)
  local h = hash.fetch(key, { id, slot })
  h.slot = slot
  return h
end

function calls.get(h, id)
  if not h.f[id] then return nil end
  return pack.parse(h.f[id])
end

function calls.set(h, id, record)
  hash.set(h, id, pack.format(record, ORDER))
end

-- A hold goes once: this is written before the runs are, so that a resend after a script that was cut short finds
-- nothing left to let go.
function calls.write_unheld(h, id, record, ttl_ms)
  if not (record.model_calls or record.tokens or record.cost_micros) then return end
  record.model_calls, record.tokens, record.cost_micros = nil, nil, nil
  calls.set(h, id, record)
  hash.write(h, ttl_ms)
end

-- Remembers an answered id; the oldest answered one beyond the ring goes.
function calls.remember(h, root, id, record)
  local oldest = h.f[h.slot]
  if oldest and oldest ~= id then
    local old = redis.call("HGET", h.key, oldest)
    if old then
      local known = pack.parse(old)
      if known.state ~= "open" and "@" .. (known.slot or "") == h.slot then
        h.f[oldest] = old
        hash.drop(h, oldest)
      end
    end
  end
  hash.set(h, h.slot, id)
  hash.add(root, "answered", 1)
  record.slot = string.sub(h.slot, 2)
  calls.set(h, id, record)
end

return calls
