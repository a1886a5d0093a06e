"""Work on whole datasets: unit by unit, here or on a Ray cluster, and resumable.

`units` runs a list of units and keeps their results in a folder. `conversion` writes a dataset
again, by one writer for each format. Only commands import this package.
"""
