-- Returns the holders of each leading block, up to the first that has none, as runs of blocks
-- with the same ones: how many blocks (2 bytes), how many holders (1 byte), their epochs.
-- One string in and one out, taken apart by one call: a loop over 256 keys here, or 256
-- keys and values as arguments and answers, costs as much again as the lookup itself.
-- ARGV: the block keys, one after the other; the length of each
local keys = {struct.unpack(string.rep('c' .. ARGV[2], #ARGV[1] / ARGV[2]), ARGV[1])}
keys[#keys] = nil -- where the unpacking ended
local found, last, count = {}, nil, 0
local function run()
  local num = math.min(math.floor(#last / 8), 255)
  found[#found + 1] = struct.pack('<I2B', count, num) .. string.sub(last, 1, num * 8)
end
for _, holders in ipairs(redis.call('MGET', unpack(keys))) do
  if holders == last then
    count = count + 1
  else
    if last then run() end
    last, count = holders, 1
    if not holders then break end
  end
end
if last then run() end
return table.concat(found)
