"""The measurements of `gyre bench`: Gyre and torch's DataLoader on the same local files.

In: the description of a dataset and the user's choices. Out: rates, times and CPU time of each
loader. `opponents` has the other libraries; `comparison` runs every loader in a separate process.
Imported by `command`, which prints the results.
"""
