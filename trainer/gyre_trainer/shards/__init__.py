"""Parameter shards: how parameters are cut, where a rank keeps its shard, and how shards travel.

In: a module's parameters and the cuts of a rule. Out: DTensor parameters over one flat buffer per
rank; the remote slices of a ring pass, one after the other; and the averaged gradient of the own
slice. Nothing here runs a module. `rotation` and all packages above it may import this one.
"""
