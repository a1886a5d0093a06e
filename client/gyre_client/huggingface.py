"""The name of `gyre_client.integrations.huggingface` in earlier versions."""

from gyre_client.integrations.huggingface import LoaderState

__all__ = ["LoaderState"]
