-- unlist: a record that was listed is finished; it leaves the index unless it was listed anew since.
--
-- KEYS[1]  doubt_key   zset    claims by the end of their lease
-- ARGV[1]  member      str     key of the ledger record
-- ARGV[2]  score       str     what the index said when the record was looked at
-- RETURNS {status}    "unlisted" | "listed"
-- ERRORS  -
-- EXPIRES doubt_key: never
-- FLAGS   allow-oom
--@bind

if redis.call("ZSCORE", doubt_key, member) ~= score then return { "listed" } end
redis.call("ZREM", doubt_key, member)
return { "unlisted" }
