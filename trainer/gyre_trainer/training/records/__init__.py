"""What a run writes down: its history, TensorBoard events, the progress line, and the report at its end.

In: the steps of all ranks, gathered. Out: `history.jsonl`, `report.json`, `loss.png` and event files in
the run directory, written by rank 0. Nothing here touches a model. Only `gyre_trainer.training` imports
this package.
"""
