"""The `gyre` command: asks a daemon and prints what it answers.

In: the command line. Out: text for people or one JSON document, and an exit status. Each command
has a module of its own; `gyre_client.display` draws what they print. Nothing here needs torch or
numpy, except `gyre bench`. Only `gyre_client.__main__` imports it.
"""
