"""Initial values, made or read shard by shard: no rank ever holds what it does not store."""
