"""Which samples make which batch: pure arithmetic that needs numpy and nothing else.

In: the number of samples of a dataset and its blocks, a seed, an order, a global batch size, a
step. Out: sample ids, the cursor that resumes there, and how well an order shuffles. `datasets`,
`fetching`, `sessions` and `service` import this package; it imports only `errors`.
"""
