"""Blocks whose last layer lies in another module than the rest, as BERT's do.

In: a module with such a block inside, and a rule that names its core and its last layer. Out: the
same module, in which both rotate as one, and everything else runs as before. `gyre_trainer.rotate`
and `layers.whole` import this package; users name the core in `AttentionRule` or `MLPRule`.
"""
