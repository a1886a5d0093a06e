"""The commands of `gyre-train`: arguments and actions.

In: the arguments of the command line.
Out: a namespace that says how to read the configuration, what to check before ranks start, what a
rank does, and what is shown where no rank is needed.
Only `gyre_trainer.cli` may import this package.
"""
