"""An object server that misbehaves on order, for tests and benchmarks.

`python -m tests.object_server`.

It speaks as much of S3 and of plain HTTP as readers need (GET with ranges, HEAD, PUT, DELETE,
listings in pages), begins its answers as late as its script says, and counts what it was asked.
`process` starts one and talks to it.
"""
