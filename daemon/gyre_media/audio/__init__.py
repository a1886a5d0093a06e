"""Transforms of sound, behind the extra `media`.

Between them a sound is float32 from -1 to 1, [n] where it has one channel, else [n, channels].
"""
