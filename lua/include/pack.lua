-- pack: small records as readable text, `name=value name=value`.
--
-- Values are free of white space, "=" and "%": free text is escaped the way
-- URLs do it, so that redis-cli shows what a stranger can read.
local pack = {}

function pack.parse(text)
  local record = {}
  if not text or text == "" then return record end
  for name, value in string.gmatch(text, "([%w_]+)=(%S*)") do
    record[name] = value
  end
  return record
end

-- `names` gives the order; absent and empty members are left out.
function pack.format(record, names)
  local parts = {}
  for i = 1, #names do
    local value = record[names[i]]
    if value ~= nil and value ~= "" then
      parts[#parts + 1] = names[i] .. "=" .. value
    end
  end
  return table.concat(parts, " ")
end

function pack.escape(text)
  return (string.gsub(text, "[%s%c=%%]", function(char)
    return string.format("%%%02X", string.byte(char))
  end))
end

function pack.unescape(text)
  return (string.gsub(text or "", "%%(%x%x)", function(hex)
    return string.char(tonumber(hex, 16))
  end))
end

-- Is `word` in a comma list?
function pack.lists(list, word)
  if not list or list == "" then return false end
  return string.find("," .. list .. ",", "," .. word .. ",", 1, true) ~= nil
end

return pack
