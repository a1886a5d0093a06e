"""One scenario of mixtures on Gyre and on public loaders: ranks change, and processes are killed.

In: two sources of documents, written in the format of each loader. Out: a row for each loader, with
the batches that differ and the documents that come twice or never, as counted. The module
`elastic_mixtures` beside this package runs it.
"""
