"""Blocks of users' models, found by their structure and tried on a twin.

In: modules of a model, and the number of ranks. Out: the rule by which each rotates as a whole, or
None. Nothing is looked up by the name of a class. `gyre_trainer.rotate` and `accounting` may import
this package.
"""
