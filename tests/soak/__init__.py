"""Kills and faults at random points while several jobs read, and a checker of what they read.

`python -m tests.soak --seconds 3600 --seed 7` starts two daemons, an object server and the ranks of
several jobs, makes one fault after the other, and writes what happened as JSON lines. `checker`
reads these lines and decides. Nothing but `plan`, `contents` and the lines themselves is shared by
the two sides: the checker computes which samples each step has from `gyre_daemon.order`, and their
bytes from the formulas by which the datasets were written.

plan        the jobs and their datasets
contents    the datasets: files with bytes that follow from the sample's number
reader      the program of one rank: reads, writes a line for each batch, keeps checkpoints
cluster     the processes: daemons, ranks, the object server
faults      each fault, and how it is mended
history     JSON lines: written by ranks and the driver, read by the checker
checker     exactly once, the right bytes, equal steps, memory and descriptors back, nothing left
"""
