"""Filters: which samples of a dataset are in its order, decided from its index alone.

In: an expression and an index. Out: an index of the remaining samples. `indexing` imports it.
It is pure.
"""
