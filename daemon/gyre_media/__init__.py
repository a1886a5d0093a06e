"""Images, boxes, sound and video: transforms and formats next to the daemon.

A plug-in as any other package is one: entry points of `pyproject.toml` declare its transforms and
formats, which build on `gyre_daemon.transforms` and `gyre_daemon.datasets.formats`. The daemon
loads an entry point only if a dataset or a chain names it.
"""
