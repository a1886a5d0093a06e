"""The format `tokens`: files of token ids, with or without a header.

`format` has the options and the index, `probe` reads the first bytes of the shards, `headers`
interprets them, and `foreign` recognises files without token ids.
"""

from gyre_daemon.datasets.formats.tokens.format import TokensFormat, TokensOptions

__all__ = ["TokensFormat", "TokensOptions"]
