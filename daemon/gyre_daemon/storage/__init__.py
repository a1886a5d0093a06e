"""Where shards lie and how their bytes are read: the only wing that knows fsspec.

In: a `Location` that the operator wrote, and `Reads`: half-open ranges of shards with the memory where their bytes belong.
Out: the bytes, in place. Reading waits; it never decodes. `local` reads files, `sources` carry requests, `engine` decides when
each is sent and sent again, `cache` keeps blocks of remote shards. `datasets` and `sessions` import it.
"""
