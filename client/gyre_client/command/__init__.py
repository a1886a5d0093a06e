"""The `gyre` command: asks a daemon and prints its answer.

In: the command line. Out: text for people or one JSON document, and an exit status. Each command
has a separate module; `gyre_client.display` draws their output. Nothing here needs torch or
numpy, except `gyre bench`. Only `gyre_client.__main__` imports it.
"""
