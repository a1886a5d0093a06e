"""Receives one rank's batches and turns them into tensors, across restarts of the daemon.

In: a `Target` (how the daemon is found) and a request for a session. Out: one `Batch` for each
step, in order, with its cursor, in host memory (`BatchStream`) or on a CUDA device
(`DeviceStream`).
Imported by `loader`.
"""
