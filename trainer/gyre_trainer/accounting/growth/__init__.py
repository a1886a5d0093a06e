"""What a step of a large model costs, from dry runs of small ones.

In: a configuration, whose layers are alike, or the experts of their lists.
Out: the dry runs of few layers and few experts, and the figures of all, which follow from them.
Each layer and each expert adds as much to every moment of a step as the one before it.
Only `gyre_trainer.accounting` may import this package.
"""
