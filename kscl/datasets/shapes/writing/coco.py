"""The detection set as COCO files too, with a mask for every object.

Boxes, classes and images are those of the VOC folder. Objects that are difficult there are crowds
here, which scorers ignore as well; their masks are run lengths, as COCO's crowds have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kscl.datasets.shapes.scene import Scene
from kscl.datasets.shapes.writing.voc import splits_of

HOME = "coco"
SPLITS = ("train", "val", "trainval", "test")


def file_path(split: str) -> str:
    """Return where the file of a split is saved."""
    return f"{HOME}/instances_{split}.json"


def file_paths() -> list[str]:
    """List the files of all splits."""
    return [file_path(split) for split in SPLITS]


def files(
    trainval: Mapping[str, Scene], test: Mapping[str, Scene], class_names: Sequence[str]
) -> dict[str, str]:
    """Return path and text of the file of every split, for scenes by name."""
    scenes = {**trainval, **test}
    return {
        file_path(split): _text({name: scenes[name] for name in members}, class_names)
        for split, members in splits_of(list(trainval), list(test)).items()
    }


def _text(scenes: Mapping[str, Scene], class_names: Sequence[str]) -> str:
    annotations: list[dict[str, Any]] = []
    for name, scene in scenes.items():
        for each in scene.objects:
            xmin, ymin, xmax, ymax = each.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": int(name),
                    "category_id": each.label + 1,
                    "bbox": [xmin - 1, ymin - 1, xmax - xmin + 1, ymax - ymin + 1],
                    "area": each.area,
                    "iscrowd": int(each.difficult),
                    "segmentation": each.segmentation,
                }
            )
    content = {
        "info": {"description": "KSCL shapes"},
        "images": [
            {
                "id": int(name),
                "file_name": f"{name}.jpg",
                "width": scene.width,
                "height": scene.height,
            }
            for name, scene in scenes.items()
        ],
        "categories": [{"id": label + 1, "name": name} for label, name in enumerate(class_names)],
        "annotations": annotations,
    }
    return json.dumps(content, separators=(",", ":")) + "\n"
