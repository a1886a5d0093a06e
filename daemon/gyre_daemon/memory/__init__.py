"""The memory of batches: a budget, arenas, slots in them, and how clients map them.

In: how many bytes a session wants. Out: slots that batches are written into. An *arena* is a sealed
memory file, and a *slot* is the place of one batch group in it. A session's *share* is its part of
the budget. Nothing here knows the contents of a slot. It imports `copy_workers` and
`storage.reads`; `fetching`, `sessions`, `service` and `server` import it.
"""
