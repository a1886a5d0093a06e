"""Transforms of images, behind the extra `images`.

Between them an image is uint8 [height, width, channels], with 3 channels (RGB) or 1 (gray). What
they do to it, and what they draw at random, is what the transforms `v2` of torchvision do: see
`tests/unit/transforms/test_daemon_torchvision.py`. Those of `annotated` take masks and boxes along.
"""
