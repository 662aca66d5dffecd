-- Returns epoch, description, epoch, description, ... of the members that live.
-- KEYS: members (set of epochs)    ARGV: prefix of member keys
local found = {}
for _, epoch in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local description = redis.call('GET', ARGV[1] .. epoch)
  if description then
    found[#found + 1] = epoch
    found[#found + 1] = description
  end
end
return found
