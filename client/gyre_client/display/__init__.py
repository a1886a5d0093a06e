"""The output of the `gyre` command: text for people, live screens, progress, samples.

In: answers of a daemon, the first samples of a dataset. Out: lines for a terminal.
`formatting` lays out tables and draws live screens. Nothing here needs torch or numpy.
"""
