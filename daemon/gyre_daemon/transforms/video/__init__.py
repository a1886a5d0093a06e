"""Transforms of videos, behind the extra `media`."""
