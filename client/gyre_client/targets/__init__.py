"""Finds the daemon for a dataset: at an address that was given, or the private one of this run.

In: an address or None, and a dataset. Out: a `Target`, whose address stays the same when the
daemon is restarted. All processes of a run on a machine share its private daemon, which ends with
its last client.
Imported by `batches`, `loader` and `command`.
"""
