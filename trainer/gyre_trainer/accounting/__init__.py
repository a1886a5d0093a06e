"""The cost of one training step for a rank: live bytes by category, and bytes sent.

In: a configuration and a number of ranks. Out: tables and figures, for rotation next to FSDP2 and
DDP, from a step on fake tensors. The baselines live here because `gyre-train plan` compares with
them. Only `gyre_trainer.commands` imports this package.
"""
