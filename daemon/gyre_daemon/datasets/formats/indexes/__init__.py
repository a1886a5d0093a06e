"""The indexes of formats: the place of each sample, in few bytes a sample. Pure.

In: the arrays that the scans of shards returned. Out: a `SampleIndex`. `table` fits most formats;
`strided` is for samples of one size, `chunk_index` for rows of chunks, `union_index` for
shards whose columns differ.
"""
