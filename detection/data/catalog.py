"""Any VOC folder, COCO file or built-in set in Detectron2's catalogs, with one class list.

The tools hand their sets down as objects (`detection.data.sets`); the catalogs are for projects of
Detectron2 that name them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets.coco import load_coco_json
from detectron2.structures import BoxMode

from detection.data.masks import segmentation
from detection.errors import DetectionError
from detection.scoring.boxes import GroundTruth, make_ground_truth
from kscl.data.annotated.coco import read_category_names
from kscl.data.annotations import (
    ANNOTATION_FORMATS,
    AnnotatedObject,
    AnnotatedSet,
    Source,
    check_class_names,
    is_set_name,
    parse_source,
    read_source,
    shared_class_names,
)

Dicts = list[dict[str, Any]]


def register_datasets(
    train: Sequence[str], test: Sequence[str], class_names: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Register the names of a config's DATASETS, all with one class list; return that list.

    A name is `voc:FOLDER:SPLIT`, `coco:FILE.json:IMAGES`, one of Detectron2's, or one that was
    registered before. Without `class_names`, the list is the training sets' own.
    """
    sources = {name: source_of(name) for name in (*train, *test)}
    deciding = [sources[name] for name in (train or test)]
    if class_names is None:
        classes = shared_class_names(deciding)
    else:
        classes = check_class_names(class_names, "the class list")
    for source in sources.values():
        _register(source, classes)
    return classes


def register_voc_folder(
    name: str, root: str | Path, split: str, class_names: Sequence[str] | None = None
) -> None:
    """Register one split; without `class_names`, the classes are found in its annotations."""
    source = Source(name, "voc", Path(root), split=split)
    _register(source, check_class_names(class_names or shared_class_names([source]), name))


def register_coco_json(
    name: str,
    json_file: str | Path,
    image_root: str | Path,
    class_names: Sequence[str] | None = None,
) -> None:
    """Register a COCO file; without `class_names`, the classes are its categories by id."""
    source = Source(name, "coco", Path(image_root), annotations=Path(json_file))
    _register(source, check_class_names(class_names or shared_class_names([source]), name))


def source_of(name: str) -> Source:
    """Return where a set is that was registered or that a name stands for."""
    if name not in DatasetCatalog or is_set_name(name):
        return parse_source(name)
    known = MetadataCatalog.get(name).as_dict()
    if "dirname" in known:  # asked first: Detectron2's COCO evaluator adds a json_file to VOC sets
        return Source(name, "voc", Path(known["dirname"]), split=known["split"])
    if "image_root" in known:
        root, file = Path(known["image_root"]), Path(known["json_file"])
        return Source(name, "coco", root, annotations=file)
    raise DetectionError(
        f"{name} is registered, but neither as a VOC folder nor as a COCO file, so it cannot be "
        "checked or scored. Use register_voc_folder or register_coco_json."
    )


def ground_truth_of(name: str, with_masks: bool = False) -> GroundTruth:
    """Return what there is to find in a registered set, with the class list of its entry."""
    classes = MetadataCatalog.get(name).thing_classes
    found = read_source(source_of(name), classes, with_images=False, with_masks=with_masks)
    return make_ground_truth(found.checked())


def detectron2_dicts(annotated: AnnotatedSet, crowds: bool = False) -> Dicts:
    """Return the images as Detectron2's own loaders do, with `difficult` beside each box.

    VOC's difficult objects are trained on, as there; those of a set with `crowds` (COCO,
    Cityscapes) are not. The scorers ignore both. An object has its mask if the set was read with
    masks.
    """
    index = {name: number for number, name in enumerate(annotated.class_names)}
    return [
        {
            "file_name": str(image.path),
            "image_id": image.id,
            "height": image.height,
            "width": image.width,
            "annotations": [
                {
                    "category_id": index[thing.name],
                    "difficult": int(thing.difficult),
                    **_box(thing, crowds),
                    **_mask(thing),
                }
                for thing in image.objects
                if thing.mask is None or _mask(thing)  # Detectron2 leaves such objects out too
            ],
        }
        for image in annotated.images
    ]


def _box(thing: AnnotatedObject, crowds: bool) -> dict[str, Any]:
    """Return the box in the mode of the file, which Detectron2 converts in single precision."""
    if not crowds:
        return {"bbox": list(thing.box), "bbox_mode": BoxMode.XYXY_ABS}
    x1, y1, x2, y2 = thing.box
    box = [x1, y1, x2 - x1, y2 - y1]
    return {"bbox": box, "bbox_mode": BoxMode.XYWH_ABS, "iscrowd": int(thing.difficult)}


def _mask(thing: AnnotatedObject) -> dict[str, Any]:
    found = None if thing.mask is None else segmentation(thing.mask)
    return {} if found is None else {"segmentation": found}


def _register(source: Source, classes: tuple[str, ...]) -> None:
    """Enter a set in both catalogs; the same entry twice changes nothing."""
    described = {"thing_classes": list(classes), **_metadata(source, classes)}
    if source.name in DatasetCatalog:
        known = MetadataCatalog.get(source.name).as_dict()
        if all(known.get(key) == value for key, value in described.items()):
            return
        if not source.official:
            raise DetectionError(
                f"{source.name} is registered already, with another folder or class list. Use one "
                "class list for all sets of a run, or another name."
            )
        # A built-in entry looks where DETECTRON2_DATASETS pointed when Detectron2 was imported.
        DatasetCatalog.remove(source.name)
        MetadataCatalog.pop(source.name, None)
    load: Callable[[], Dicts]
    form = ANNOTATION_FORMATS[source.format]
    if form.name == "coco":
        load = lambda: coco_dicts_with_masks(source, classes)  # noqa: E731
    else:
        load = lambda: detectron2_dicts(  # noqa: E731
            read_source(source, classes, with_masks=True).checked(), form.crowds
        )
    DatasetCatalog.register(source.name, load)
    MetadataCatalog.get(source.name).set(**described)


def _metadata(source: Source, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return what Detectron2's own evaluator of the format needs, if there is one."""
    if source.format == "voc":
        return {
            "dirname": str(source.root),
            "split": source.split,
            # Detectron2's VOC evaluator uses 11 points for 2007; any other set is scored like that.
            "year": 2012 if source.name.startswith("voc_2012") else 2007,
            "evaluator_type": "pascal_voc",
        }
    if source.format == "coco":
        return {
            "thing_dataset_id_to_contiguous_id": _contiguous_ids(source, classes),
            "json_file": str(source.annotations),
            "image_root": str(source.root),
            "evaluator_type": "coco",
        }
    if source.format == "cityscapes":
        return {
            "image_dir": str(source.root),
            "gt_dir": str(source.annotations),
            "evaluator_type": "cityscapes_instance",
        }
    return {}


def _contiguous_ids(source: Source, classes: Sequence[str]) -> dict[Any, int]:
    """Return the index in the class list of every category id of a COCO file."""
    assert source.annotations is not None
    names = read_category_names(source.annotations)
    return {key: classes.index(name) for key, name in names.items() if name in classes}


def coco_dicts_with_masks(source: Source, classes: Sequence[str]) -> Dicts:
    """Load a COCO file by Detectron2's own loader, which keeps masks, with our class list."""
    index = _contiguous_ids(source, classes)
    dicts = load_coco_json(str(source.annotations), str(source.root))
    for image in dicts:
        for thing in image["annotations"]:
            if thing["category_id"] not in index:
                raise DetectionError(
                    f"{source.annotations}: {image['file_name']} has an object of the category "
                    f"{thing['category_id']}, which is not in the class list. Correct the list or "
                    "the file; preflight lists all such objects."
                )
            thing["category_id"] = index[thing["category_id"]]
    return dicts
