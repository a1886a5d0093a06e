"""Processes that are forked from an interpreter which has imported already: most of what a daemon's start costs.

Each is a process of its own, with the memory, the threads and the files of one that was just started: the interpreter that
it is forked from imports, and does nothing else. What differs is the seed of `hash`, which is one for all.
"""
