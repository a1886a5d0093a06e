"""A model's last linear layer, from features to classes, and its cross-entropy.

In: features and targets, from a caller or from a model that computes its own loss. Out: the loss,
by slices of the vocabulary, so that the logits of all tokens never exist. Either the slices go
round the ring, or the tokens do. `gyre_trainer.rotate` imports this package; users import from
there.
"""
