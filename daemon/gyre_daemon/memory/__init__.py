"""The memory of batches: a budget, arenas that are sealed memory files, slots in them, and how clients get to map them.

In: how many bytes a session wants. Out: slots to write batches into. What lies in them is not known here. `sessions` imports
it.
"""
