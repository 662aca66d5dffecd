-- A node says who it is; an earlier start of the same node is forgotten, and every node whose lease ran
-- out: one that only slept joins again.
-- KEYS: members (set of epochs), nodes (hash of node id to epoch), member (this one's key)
-- ARGV: node id, epoch (8 bytes), description, lease in ms, prefix of member keys
local before = redis.call('HGET', KEYS[2], ARGV[1])
if before and before ~= ARGV[2] then
  redis.call('SREM', KEYS[1], before)
  redis.call('DEL', ARGV[5] .. before)
end
local nodes = redis.call('HGETALL', KEYS[2])
for at = 1, #nodes, 2 do
  if redis.call('EXISTS', ARGV[5] .. nodes[at + 1]) == 0 then
    redis.call('HDEL', KEYS[2], nodes[at])
    redis.call('SREM', KEYS[1], nodes[at + 1])
  end
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
return 1
