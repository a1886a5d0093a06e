"""Fuzz targets: every parser of bytes that others bring to the daemon.

`targets` has one function for each, which takes any bytes and raises only if the daemon would have
a fault of its own. `make fuzz` runs each for ten minutes (`FUZZ_S=600`) with atheris, which follows
the coverage. The corpora in `corpus/` are where it begins, and `test_fuzz_targets.py` replays them,
with some mutations of each, in every test run. An input that found a fault stays in its corpus.
"""
