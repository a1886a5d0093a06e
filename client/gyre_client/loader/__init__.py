"""The public `Loader`: epochs, state, and the checks of its arguments, over a stream of batches.

In: the arguments of a training script. Out: dicts of tensors by field name, and a `state_dict`.
`interop` holds the parts of a loader that other frameworks and notebooks expect.
Imported by scripts through `gyre_client`, by `gyre_client.integrations` and by `bench`.
"""
