-- trace: one stream entry an operation, bounded (SPEC 3).
--
-- It is the first write of every script: were the key of a wrong type, nothing
-- else would have been written yet.
--@include num
local trace = {}

local ORDER = {
  "op", "run", "agent", "to", "tool", "call", "fp", "args", "target", "key", "retry", "status", "verdict", "version", "moved",
  "rounds", "model_calls", "tokens", "cost_micros", "reserve", "retry_ms", "limits", "was", "state", "scope", "change", "policy", "ref", "asked", "note",
  "action", "reason", "step", "limit", "observed", "steps", "would", "outcome", "claim", "operation_id", "digest", "bytes",
  "duration_ms",
}

-- fields: by name; absent and empty ones are left out.
function trace.add(key, settings, now, fields)
  local trace_max = tonumber(settings.trace_max or "0")
  if trace_max == 0 then return end
  local flat = { "ms", num.text(now) }
  for i = 1, #ORDER do
    local name = ORDER[i]
    local value = fields[name]
    if value and value ~= "" then
      flat[#flat + 1], flat[#flat + 2] = name, value
    end
  end
  redis.call("XADD", key, "MAXLEN", "~", num.text(trace_max), "*", unpack(flat))
  redis.call("PEXPIRE", key, settings.run_ttl_ms)
end

return trace
