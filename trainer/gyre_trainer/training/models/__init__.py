"""The models that `gyre-train` trains: our GPT, and language models of `transformers`.

In: a table of the configuration. Out: a module, which `training.build` rotates, and its loss, for
which logits need not exist whole. `gyre_trainer.training`, `gyre_trainer.accounting` and
`gyre_trainer.commands` may import this package.
"""
