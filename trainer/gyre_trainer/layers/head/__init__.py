"""A model's last linear layer, from features to classes, and its loss.

In: features and targets, from a caller, or a library's model and its batch. Out: the loss, or
log-probabilities, by slices of the vocabulary, so that the logits of all tokens never exist.
`gyre_trainer.rotate` imports this package; users import from there.
"""
