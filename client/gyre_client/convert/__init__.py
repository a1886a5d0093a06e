"""Writes a dataset again in another format, with that format's own writer.

In: a dataset that a daemon serves, and a format. Out: a new folder, whole or not at all. `rows`
reads the samples, `writers` has one writer for each format, and `conversion` joins them. Only the
command `gyre convert` imports this package; it imports `loader`, numpy and torch.
"""
