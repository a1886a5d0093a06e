"""What language models other than causal ones are asked to predict.

In: a loader's batch, and the section `[objective]` of the configuration. Out: examples: tokens of
which some are masked, rows of which spans were taken out, or sources and their targets. Random
numbers follow from the seed, the step and the sample, so any number of ranks has the same examples.
`gyre_trainer.training` and the packages above it may import this package.
"""
