"""Reading from object storage: rates, indexes, TLS, and faults."""
