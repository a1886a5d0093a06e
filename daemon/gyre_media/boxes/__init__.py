"""Bounding boxes of objects in images: where they come from, how they move, which of them stay.

In: lists of numbers or JSON, next to an image. Between transforms, the boxes of a sample are
float32 [n, 5], see `moving`. Out: [n, 4] or [max_boxes, 4] and the number of visible boxes. The
transforms of images that move pixels import `moving`, and need nothing else of this package.
"""
