"""Memory that a daemon shares: its arenas are mapped here once they were checked.

In: an address, a session id. Out: arrays over mapped pages, each returned to the daemon when its
last user lets go. Needs numpy, and nothing here knows torch. Imported by `batches`.
"""
