"""Where shards lie and how their bytes are read: the only package that knows fsspec.

In: a `Location`, and a `ReadPlan`: half-open ranges of shards with the memory where their bytes
belong. Out: the bytes, in place. Reading waits; it never decodes. `sources` open locations, read
files and carry requests, `engine` decides when each is sent and sent again, `cache` keeps blocks of
remote shards. `datasets`, `memory`, `fetching`,
`sessions`, `service` and `server` import this package.
"""
