"""Hypothesis draws the same examples on every run, keeps none, and knows no deadline: a slow machine is no counterexample."""

from hypothesis import settings

settings.register_profile("gyre", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("gyre")
