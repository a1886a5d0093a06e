"""Speaks the protocol of one daemon: calls, the control stream, and the side channel.

In: an address, requests, a session id. Out: protocol messages that were checked, and an error of
`gyre_client.errors` for every failure. Nothing here knows torch or numpy. Imported by
`targets`, `batches`, `loader` and `command`.
"""
