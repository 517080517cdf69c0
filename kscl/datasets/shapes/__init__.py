"""A drawn data set of textured shapes, the same to the byte on every machine.

20 classes, each a pair of form and texture: unlabeled pictures to pretrain on, class folders for
the linear probe, and crowded scenes in the layout of PASCAL VOC for detection.
"""

from kscl.datasets.shapes.contact_sheet import draw_contact_sheet
from kscl.datasets.shapes.draw import CLASS_NAMES
from kscl.datasets.shapes.write import ShapesSettings, find_shapes, make_shapes, verify_shapes

__all__ = [
    "CLASS_NAMES",
    "ShapesSettings",
    "draw_contact_sheet",
    "find_shapes",
    "make_shapes",
    "verify_shapes",
]
