"""Checkpoints: complete or absent, whole or refused, and read without running code.

In: a run's model, optimizer and loader. Out: directories that load at any number of ranks.
`training.train` and the command import it; scripts of users may take `reading` for their own
checkpoints of torch.distributed.checkpoint.
"""
