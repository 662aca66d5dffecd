-- Takes one replica from each block; a block without replicas is gone.
-- KEYS: block keys    ARGV: epoch (8 bytes)
for _, key in ipairs(KEYS) do
  local holders = redis.call('GET', key)
  if holders then
    local others = {}
    for at = 1, #holders, 8 do
      local epoch = string.sub(holders, at, at + 7)
      if epoch ~= ARGV[1] then others[#others + 1] = epoch end
    end
    if #others == 0 then
      redis.call('DEL', key)
    elseif #others * 8 < #holders then
      redis.call('SET', key, table.concat(others), 'KEEPTTL')
    end
  end
end
return #KEYS
