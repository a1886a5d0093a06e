"""Object storage: what carries a request. A `Source` sends one and gives back one answer; it never tries twice.

In: requests from the engine. Out: bytes and what the server said. obstore, plain HTTP, and any driver of fsspec.
"""
