"""One training run: from its TOML file and batches of a Gyre dataset to checkpoints and a report.

In: a configuration, a loader's batches, a checkpoint to resume from. Out: a trained model,
checkpoints, and the records of the run; as a launcher, the exit status of all ranks.
`gyre_trainer.accounting` and `gyre_trainer.commands` may import this package.
"""
