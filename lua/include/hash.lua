-- hash: a hash that is read first, changed in memory and written last.
--
-- A script is not rolled back, so every refusal must come before the first
-- write. Reading also proves the type of the key: a key of a wrong type fails
-- here, when nothing has been written yet.
--
-- Should a script be cut short between two writes all the same, the same request
-- sent again must finish it, and nothing may be given out twice. So they write in
-- this order: trace, ledger record, marks, runs, last the id that makes a repeat
-- known. Counts may then be too high by one, never too low. What gives back
-- (a hold, a step) writes the id first, for the same reason.
--@include num
local hash = {}

function hash.read(key)
  local flat, fields = redis.call("HGETALL", key), {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return { key = key, f = fields, changed = {}, dropped = {} }
end

-- Only these fields; a large hash is never read whole.
function hash.fetch(key, names)
  local values, fields = redis.call("HMGET", key, unpack(names)), {}
  for i = 1, #names do
    fields[names[i]] = values[i] or nil
  end
  return { key = key, f = fields, changed = {}, dropped = {} }
end

function hash.set(h, name, value)
  if type(value) == "number" then value = num.text(value) end
  if h.f[name] == value then return end
  h.f[name], h.changed[name], h.dropped[name] = value, value, nil
end

function hash.drop(h, name)
  if h.f[name] == nil then return end
  h.f[name], h.changed[name], h.dropped[name] = nil, nil, true
end

function hash.int(h, name)
  return num.of(h.f[name])
end

function hash.add(h, name, n)
  if n ~= 0 then hash.set(h, name, num.of(h.f[name]) + n) end
end

function hash.is_changed(h)
  return next(h.changed) ~= nil or next(h.dropped) ~= nil
end

-- Writes what changed. ttl_ms: from now; nil leaves the expiry alone, and ends it for what is kept (`h.is_kept`).
-- What is new comes before what goes: cut short between them, nothing is left without its state.
function hash.write(h, ttl_ms)
  if not hash.is_changed(h) then return end
  if h.is_kept then redis.call("PERSIST", h.key) end
  local flat = {}
  for name, value in pairs(h.changed) do
    flat[#flat + 1], flat[#flat + 2] = name, value
  end
  if #flat > 0 then redis.call("HSET", h.key, unpack(flat)) end
  local names = {}
  for name in pairs(h.dropped) do names[#names + 1] = name end
  if #names > 0 then redis.call("HDEL", h.key, unpack(names)) end
  if ttl_ms then redis.call("PEXPIRE", h.key, ttl_ms) end
end

return hash
