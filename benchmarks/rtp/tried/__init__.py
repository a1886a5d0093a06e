"""What `benchmarks.rtp.families` tries: models of `transformers` at toy width, and people's own.

In: the installed libraries; tables of families and of models.
Out: `attempt`, which rotates one of them in one way, beside the plain model.
Only `benchmarks.rtp.families` and tests import this.
"""
