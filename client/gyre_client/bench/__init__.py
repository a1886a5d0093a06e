"""The measurements of `gyre bench`: Gyre and torch's DataLoader on the same local files.

In: the description of a dataset and the user's choices. Out: rates, times and CPU time of each
loader. `data_loaders` has torch's side of the comparison; `stopwatch` runs every loader in a
separate process.
Imported by `command`, which prints the results.
"""
