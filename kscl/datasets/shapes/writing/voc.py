"""The text files of the detection set, as in the PASCAL VOC 2007 development kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kscl.datasets.shapes.scene import Scene, SceneObject

HOME = "VOCdevkit/VOC2007"

_ANNOTATION = """\
<annotation>
\t<folder>VOC2007</folder>
\t<filename>{name}.jpg</filename>
\t<source>
\t\t<database>KSCL shapes</database>
\t\t<annotation>KSCL shapes</annotation>
\t\t<image>drawn</image>
\t</source>
\t<size>
\t\t<width>{width}</width>
\t\t<height>{height}</height>
\t\t<depth>3</depth>
\t</size>
\t<segmented>0</segmented>
{objects}</annotation>
"""

_OBJECT = """\
\t<object>
\t\t<name>{name}</name>
\t\t<pose>Unspecified</pose>
\t\t<truncated>{truncated:d}</truncated>
\t\t<difficult>{difficult:d}</difficult>
\t\t<bndbox>
\t\t\t<xmin>{xmin}</xmin>
\t\t\t<ymin>{ymin}</ymin>
\t\t\t<xmax>{xmax}</xmax>
\t\t\t<ymax>{ymax}</ymax>
\t\t</bndbox>
\t</object>
"""


def picture_path(name: str) -> str:
    """Return where a scene is saved."""
    return f"{HOME}/JPEGImages/{name}.jpg"


def annotation_path(name: str) -> str:
    """Return where the boxes of a scene are saved."""
    return f"{HOME}/Annotations/{name}.xml"


def annotation(name: str, scene: Scene, class_names: Sequence[str]) -> str:
    """Return the XML text of one scene."""
    described = []
    for each in scene.objects:
        xmin, ymin, xmax, ymax = each.box
        described.append(
            _OBJECT.format(
                name=class_names[each.label],
                truncated=each.truncated,
                difficult=each.difficult,
                xmin=xmin,
                ymin=ymin,
                xmax=xmax,
                ymax=ymax,
            )
        )
    return _ANNOTATION.format(
        name=name, width=scene.width, height=scene.height, objects="".join(described)
    )


def image_set_paths(class_names: Sequence[str]) -> list[str]:
    """List every file under ImageSets/Main."""
    return list(image_sets({}, {}, class_names))


def image_sets(
    trainval: Mapping[str, Scene], test: Mapping[str, Scene], class_names: Sequence[str]
) -> dict[str, str]:
    """Return path and text of every file under ImageSets/Main, for pictures by name."""
    pictures = {**trainval, **test}
    files = {}
    for split, members in splits_of(list(trainval), list(test)).items():
        files[_set_path(split)] = "".join(f"{name}\n" for name in members)
        for label, class_name in enumerate(class_names):
            files[_set_path(f"{class_name}_{split}")] = "".join(
                f"{name} {_presence(pictures[name].objects, label):2d}\n" for name in members
            )
    return files


def splits_of(trainval: list[str], test: list[str]) -> dict[str, list[str]]:
    """Return the names of every split; `val`, to choose settings on, is a fourth of `trainval`."""
    return {
        "train": [name for index, name in enumerate(trainval) if index % 4 != 1],
        "val": trainval[1::4],
        "trainval": trainval,
        "test": test,
    }


def _set_path(name: str) -> str:
    return f"{HOME}/ImageSets/Main/{name}.txt"


def _presence(objects: Sequence[SceneObject], label: int) -> int:
    """Return 1 if the class is there, 0 if only as a difficult object, -1 if not."""
    found = [each.difficult for each in objects if each.label == label]
    if not found:
        return -1
    return 0 if all(found) else 1
