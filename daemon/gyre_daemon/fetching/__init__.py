"""From steps to whole batches in memory.

In: a planner of steps, an open dataset, slots of arenas. Out: whole batch groups, or the reason why
a batch failed, with the time that each part of the work took. `prefetch` decides which steps are
laid out and read, `layout` where their bytes go, and `fetch` reads, checks and decodes them.
`layout` is pure. `sessions` and `service` import this package; it imports `memory`,
`datasets`, `storage` and `order`.
"""
