"""Identities of callers, and their rights.

In: facts from the kernel or a credential about a caller, and the operator's rules. Out: a
`Principal`, and for a dataset or an operation yes or no. Pure: no gRPC, no event loop.
Used by `memory` (the side channel knows Unix users), `sessions` (their owners) and `service`.
"""
