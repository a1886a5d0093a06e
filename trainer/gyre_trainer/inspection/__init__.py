"""Inspects a rotated module or model: checks before training, and a description for its user.

In: rotated modules and models. Out: an error where a rule is not true of its module or the ranks'
models differ; else a plan with one row for each group of parameters. Nothing here changes a model.
`gyre_trainer.rotate`, `training` and `accounting` may import this package.
"""
