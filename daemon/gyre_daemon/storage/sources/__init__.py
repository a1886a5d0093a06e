"""Where bytes come from: local files, plain HTTP, obstore, the hub, and any fsspec driver.

`opener` makes the storage of a location: `local` reads files; a remote one sends the engine's
requests through a `Source`, which takes a range of an object, returns one `Response`, and sends
each request once.
"""
