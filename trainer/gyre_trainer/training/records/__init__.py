"""What a run writes down: history, boards, progress line, and the final report.

In: the steps of all ranks, gathered. Out: `history.jsonl`, `report.json`, `loss.png` and the files
of TensorBoard or Weights & Biases in the run directory, written by rank 0. Nothing here touches a
model. Only `gyre_trainer.training` and `gyre_trainer.commands` import this package.
"""
