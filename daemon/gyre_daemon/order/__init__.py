"""Which samples make which batch: pure arithmetic, which needs numpy and nothing else.

In: a dataset's number of samples and its blocks, a seed, an order, a global batch size, a step. Out: sample ids, and the
cursor that resumes there; also how well an order shuffles. Every other wing may import this one; it imports only `errors`.
"""
