"""`gyre-train check`: compares rotated ranks with one process on this machine's devices.

In: a device. Out: a table of rows with figures. `report` starts processes and judges; `programs`
has the functions of their ranks. Only `gyre_trainer.commands` may import this package.
"""
