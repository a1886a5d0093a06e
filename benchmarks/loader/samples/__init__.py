"""Formats and samples as people have them: beside the loaders that people use for them."""
