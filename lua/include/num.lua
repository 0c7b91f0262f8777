-- num: whole numbers as text, 0 to 2^53 - 1.
--
-- Lua's tostring writes 1e+15 where a counter needs every digit, and a sum
-- beyond 2^53 - 1 would silently lose its last ones: it stays at the bound.
local num = {}

local EXACT_MAX = 9007199254740991

function num.text(n)
  if n > EXACT_MAX then n = EXACT_MAX end
  return string.format("%.0f", n)
end

-- An absent counter is 0.
function num.of(text)
  return tonumber(text or "0") or 0
end

return num
