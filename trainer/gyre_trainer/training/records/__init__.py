"""What a run writes down: history, TensorBoard events, progress line, and the final report.

In: the steps of all ranks, gathered. Out: `history.jsonl`, `report.json`, `loss.png` and event
files in the run directory, written by rank 0. Nothing here touches a model. Only
`gyre_trainer.training` imports this package.
"""
