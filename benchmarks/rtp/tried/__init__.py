"""Models for `benchmarks.rtp.families`: those of `transformers` at toy width, and own ones.

In: the installed libraries; tables of families and of models.
Out: `attempt`, which rotates one of them in one way, beside the plain model.
Only `benchmarks.rtp.families` and tests import this.
"""
