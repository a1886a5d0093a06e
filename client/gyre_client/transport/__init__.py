"""Reaches one daemon, at an address or this run's private one, and speaks its protocol.

In: an address or None, a user's arguments, a session id. Out: a `Target`, which stays the same when
the daemon is restarted; protocol messages that were checked, and an error of `gyre_client.errors`
for every failure. `arguments` makes requests of values of any type, `answers` checks messages of a
daemon that may be broken. Nothing here knows torch or numpy. All other packages import it.
"""
