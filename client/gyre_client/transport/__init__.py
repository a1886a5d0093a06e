"""Speaks the protocol of one daemon: calls, the control stream, and memory shared with it.

In: an address, requests, a session id. Out: protocol messages, mapped arenas, and an error of
`gyre_client.errors` for every failure. Nothing here knows torch; only `arena`, `mapping` and
`pages` need numpy. Imported by `targets`, `batches`, `loader` and `command`.
"""
