"""Files of this machine: mapped, read ahead where they are cold, and copied into batches by threads or copiers.

In: `Reads` of local shards. Out: their bytes, or an error that names the shard and what became of it.
"""
