"""Who calls, and what each caller may do.

In: what the kernel or a credential says of a caller, and the operator's rules. Out: a `Principal`,
and for a dataset or an operation yes or no. Pure: no gRPC, no event loop.
Used by `memory` (the side channel knows Unix users), `sessions` (their owners) and `service`.
"""
