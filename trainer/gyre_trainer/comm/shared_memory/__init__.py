"""Hops between two processes of one host: one copy in memory that both have mapped.

In: the process group, once, to find out which neighbours are on this host. Out: a transport with
the interface of `gyre_trainer.comm.transport`, and buffers in memory that a neighbour can map. Only
`gyre_trainer.comm.ring_registry` imports it.
"""
