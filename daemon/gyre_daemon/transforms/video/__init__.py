"""Transforms of videos, behind the extra `video`."""
