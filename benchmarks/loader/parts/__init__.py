"""The cost of single parts of the daemon and the transport."""
