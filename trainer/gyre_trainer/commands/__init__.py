"""The commands of `gyre-train`: arguments and actions.

In: the arguments of the command line. Out: the exit status.
Only `gyre_trainer.cli` may import this package.
"""
