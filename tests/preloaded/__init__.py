"""Test processes that are forked from an interpreter which has imported their modules already.

Imports are most of what a daemon's start costs. Each forked process has the memory, threads and
files of one that was just started, because the interpreter only imports before it forks. One thing
differs: all of them share the seed of `hash`.
"""
