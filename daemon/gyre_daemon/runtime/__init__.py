"""Process-level needs of any service; nothing here knows about datasets or batches.

Fair scheduling of threads and requests, addresses, sockets and files that only the daemon's user
writes, limits of the machine, the log and the service manager's protocol, plug-ins. Every package
may import it; it imports only `errors`.
"""
