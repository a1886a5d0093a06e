"""The `gyre` command: asks a daemon and prints its answer.

In: the command line. Out: text for people or one JSON document, and an exit status. `units` runs
work on whole datasets, here or on a Ray cluster, and resumable. Nothing here needs torch or numpy,
except `gyre bench` and `gyre convert`. Only `gyre_client.__main__` imports it.
"""
