"""KV blocks that outlive their engine: a pool of blocks is a file in memory, see docs/kv_cache.md."""
