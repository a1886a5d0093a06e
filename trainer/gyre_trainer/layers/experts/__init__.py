"""Mixed experts: layers of which each token takes a few.

In: experts of our own, a user's module whose weights are stacked by expert, or a list of modules.
Out: stacked experts that rotate as one module, and lists of which every rank calls all experts,
those that its tokens did not choose with no tokens. The other modules of `gyre_trainer.layers`,
`gyre_trainer.rotate`, `training` and `accounting` may import this package, and so may users.
"""
