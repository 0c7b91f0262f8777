-- answer: what a script says: action, reason, then names and values.
--@include num
local answer = {}

-- extras: by name; absent and empty ones are left out.
function answer.say(action, reason, extras)
  local reply = { action, reason or "" }
  for name, value in pairs(extras or {}) do
    if type(value) == "number" then value = num.text(value) end
    if value and value ~= "" then
      reply[#reply + 1], reply[#reply + 2] = name, value
    end
  end
  return reply
end

-- What goes with every answer about a run.
function answer.run(c, extras)
  if c.own then
    extras.epoch, extras.rules = c.own.f.epoch, c.root.f.rules
  end
  return extras
end

return answer
