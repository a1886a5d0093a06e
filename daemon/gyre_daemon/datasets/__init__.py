"""Datasets: their formats, where each of their samples is, and the cost of reading in an order.

In: the shards of a storage and the operator's configuration. Out: a `Dataset`, whose index maps
sample ids to byte ranges. `indexing` opens datasets, and its `catalog` keeps them. `scanning` has
`shard_worker` scan their shards in processes, `sidecars` keeps the findings, and `formats` is pure.
`codecs` checks and decodes stored bytes, and `made_shards` whole chunks. `known_formats` lists the
formats, `dataset` has the lengths of samples for `balance` and `bucket`, `packing` packs them,
`filters` leaves some out, and `cost` estimates a reading. `checks` finds corrupt samples, and
limits and reports those that others replace. This package imports `order` and `storage`;
`fetching`, `sessions`, `service` and `server` import it.
"""
