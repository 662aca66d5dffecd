-- Adds one replica to each block and lets the block's time run anew.
-- KEYS: block keys    ARGV: epoch (8 bytes), life in ms, most bytes of a value
-- A value is the epochs of its holders, 8 bytes each, the newest last; the oldest fall out.
for _, key in ipairs(KEYS) do
  local holders = redis.call('GET', key) or ''
  local known = false
  for at = 1, #holders, 8 do
    if string.sub(holders, at, at + 7) == ARGV[1] then known = true end
  end
  if known then
    redis.call('PEXPIRE', key, ARGV[2])
  else
    redis.call('SET', key, string.sub(holders .. ARGV[1], -tonumber(ARGV[3])), 'PX', ARGV[2])
  end
end
return #KEYS
