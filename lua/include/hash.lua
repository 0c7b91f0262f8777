-- hash: a hash that is read first, changed in memory and written last.
--
-- A script is not rolled back, so every refusal must come before the first
-- write. Reading also proves the type of the key: a key of a wrong type fails
-- here, when nothing has been written yet.
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

-- Writes what changed. ttl_ms: from now; nil leaves the expiry alone.
function hash.write(h, ttl_ms)
  if not hash.is_changed(h) then return end
  local names = {}
  for name in pairs(h.dropped) do names[#names + 1] = name end
  if #names > 0 then redis.call("HDEL", h.key, unpack(names)) end
  local flat = {}
  for name, value in pairs(h.changed) do
    flat[#flat + 1], flat[#flat + 2] = name, value
  end
  if #flat > 0 then redis.call("HSET", h.key, unpack(flat)) end
  if ttl_ms then redis.call("PEXPIRE", h.key, ttl_ms) end
end

return hash
