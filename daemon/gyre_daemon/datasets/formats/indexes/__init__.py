"""The indexes of formats: the place of each sample, in few bytes a sample. Pure.

In: the arrays that the scans of shards returned. Out: a `SampleIndex`. `table` is for samples that
are ranges, `chunk_index` for rows of chunks, `union_index` for shards whose columns differ.
"""
