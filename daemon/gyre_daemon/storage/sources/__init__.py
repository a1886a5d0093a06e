"""The clients that carry requests to object storage: plain HTTP, obstore, and any fsspec driver.

In: a range of an object. Out: one `Response`. A source sends each request once.
"""
