"""What forward leaves for backward: tensors, random states, and gradients that wait.

In: one call's tensors and its random state, and gradients of slices as autograd finds them.
Out: the same tensors or what computes them again, the same random numbers a second time, and
gradients that are added up when a slice has moved on.
`rotation`, `layers` and all packages above them may import this one.
"""
