"""From steps to whole batches in slots: which samples, how far ahead, where each goes, and what must be done to its bytes.

In: a plan of steps, an open dataset, slots of an arena. Out: batches that are whole, or why one is not, and an account of what
it took. `window` is pure. `sessions` imports it; it imports `memory`, `datasets`, `storage` and `order`.
"""
