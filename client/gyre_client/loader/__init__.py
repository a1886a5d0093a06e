"""The public `Loader`: epochs, state, and the checks of its arguments, over a stream of batches.

In: what a training script passes. Out: dicts of tensors by field name, and a `state_dict`.
`accelerated` and `dataloader_keywords` hold what other frameworks expect of a loader.
Imported by scripts through `gyre_client`, by `gyre_client.integrations` and by `bench`.
"""
