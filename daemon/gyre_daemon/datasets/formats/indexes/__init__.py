"""The indexes of formats: where each sample lies, in few bytes a sample. Pure.

In: the arrays that the scans of shards returned. Out: a `SampleIndex`. `table` is what most formats
need; `strided` is for samples of one size, `chunk_index` for rows of chunks, `union_index` for
shards whose columns differ.
"""
