"""Detectors of other programs: recognize the head of a model, and cut it off in front of its decoding.

`recognition` is the entry. It works on values, not on names: `probing` measures which channels of the last
convolutions each output value depends on, `roles` concludes which of them are boxes, scores, objectness and keypoints,
`box_fit` finds the box code that gives the same boxes, and `cutting` makes the model that ends at these convolutions.
"""
