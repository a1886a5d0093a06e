"""Transforms of images, behind the extra `images`.

Between them an image is uint8 [height, width, channels], with 3 channels (RGB) or 1 (gray). Their
results and their random draws are those of torchvision's transforms `v2`: see
`tests/unit/transforms/test_daemon_torchvision.py`. Those of `annotated` take masks and boxes along.
"""
