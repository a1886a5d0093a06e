"""Finds the daemon for a dataset: at an address that was given, or a private one of this process.

In: an address or None, and a dataset. Out: a `Target`, whose address stays the same when the
daemon is restarted. The private daemon is a child process; it ends with its last user.
Imported by `batches`, `loader` and `command`.
"""
