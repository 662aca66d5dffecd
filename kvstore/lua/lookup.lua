-- Returns the holders of each leading block, up to the first that has none: for each one
-- byte, their number, and their epochs. One string in and one out: 256 keys and values
-- as arguments and answers cost the client as much again as the lookup itself.
-- ARGV: prefix of block keys, hashes (16 bytes each)
local keys = {}
for at = 1, #ARGV[2], 16 do
  keys[#keys + 1] = ARGV[1] .. string.sub(ARGV[2], at, at + 15)
end
local found = {}
for _, holders in ipairs(redis.call('MGET', unpack(keys))) do
  if not holders then break end
  found[#found + 1] = string.char(math.floor(#holders / 8) % 256)
  found[#found + 1] = string.sub(holders, 1, math.floor(#holders / 8) % 256 * 8)
end
return table.concat(found)
