-- clock: the one clock of a decision, in ms.
--
-- The server's, read once: on Redis 7.0 TIME moves while a script runs. The
-- caller's is taken only when the daemon runs on a virtual clock; it sends
-- nothing otherwise.
local clock = {}

function clock.now(now_ms)
  if now_ms then return now_ms end
  local time = redis.call("TIME")
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

return clock
