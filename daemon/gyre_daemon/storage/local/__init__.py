"""Files of this machine: mapped, read ahead where they are cold, copied by threads or copy workers.

In: `Reads` of local shards. Out: their bytes in place, or an error that names the shard and says
what happened to it.
"""
