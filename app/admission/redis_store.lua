-- Charges or settles one request's buckets. Called by redis_store.py; quota.py has the arithmetic and its reasons.
--
-- KEYS[1]  the reservation; KEYS[2..] one bucket for each line, "<at_us> <level>"
-- ARGV[1]  "reserve" or "settle"; ARGV[2] for how long the reservation is remembered, milliseconds
-- ARGV[3..] for each line: amount (settle: used less reserved), capacity, drain (ticks a microsecond; 0: UTC day)
-- Returns  whether it was done, the time in microseconds, and the level of each line, as text.
--
-- The server's clock is the only one. Numbers are doubles: exact to 2^53 (quota.py keeps below), printed with %.0f.
local DAY_US = 86400000000
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local today = math.floor(now / DAY_US)
local settling = ARGV[1] == 'settle'

-- A settlement needs its reservation: repeated, or after the server lost its memory, it changes nothing.
local made_us = settling and redis.call('GETDEL', KEYS[1])
if settling and not made_us then return {'0', string.format('%.0f', now)} end

local lines, fits = {}, true
for index = 2, #KEYS do
    local first = 3 * index - 3
    local line = {
        key = KEYS[index], at = now, level = 0,
        amount = tonumber(ARGV[first]), capacity = tonumber(ARGV[first + 1]), drain = tonumber(ARGV[first + 2]),
    }
    local stored = redis.call('GET', line.key)
    if stored then
        local at, level = string.match(stored, '^(%d+) (%d+)$')
        at, level = tonumber(at), tonumber(level)
        if line.drain > 0 then
            line.level = math.max(0, level - math.max(0, now - at) * line.drain)
            line.is_ahead = at > now -- the clock was set back (a failover): drain on from here
        elseif math.floor(at / DAY_US) >= today then
            line.at, line.level = math.max(at, now), level
        end
    end
    if not settling and line.amount > 0 and line.level + line.amount > line.capacity then fits = false end
    lines[index - 1] = line
end

local reply = {fits and '1' or '0', string.format('%.0f', now)}
for index, line in ipairs(lines) do
    local is_due = fits and line.amount ~= 0
    if settling and line.drain == 0 then -- only while the counter still counts the reservation's day
        is_due = is_due and math.floor(line.at / DAY_US) == math.floor(tonumber(made_us) / DAY_US)
    end
    if is_due then line.level = math.max(0, line.level + line.amount) end
    if is_due or line.is_ahead then
        local left_us = line.drain > 0 and line.level / line.drain or (math.floor(line.at / DAY_US) + 1) * DAY_US - now
        if line.level == 0 then
            redis.call('DEL', line.key)
        else
            local stored = string.format('%.0f %.0f', line.at, line.level)
            redis.call('SET', line.key, stored, 'PX', string.format('%.0f', math.ceil(left_us / 1000) + 1))
        end
    end
    reply[index + 2] = string.format('%.0f', line.level)
end
if fits and not settling then redis.call('SET', KEYS[1], string.format('%.0f', now), 'PX', ARGV[2]) end
return reply
