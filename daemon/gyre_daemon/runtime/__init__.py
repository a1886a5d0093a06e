"""Process-level needs of any service; nothing here knows about datasets or batches.

Fair scheduling of threads and requests, addresses and socket locks, the service manager's protocol,
limits of the machine, the log, and the lag of the event loop. Every package may import it; it
imports only `errors`.
"""
