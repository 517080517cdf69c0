"""The sets of a run as Detectron2 gets them, and the pass over the test set that is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.dataset_mapper import DatasetMapper
from detectron2.data.datasets import register_coco_instances
from detectron2.data.datasets.coco import load_coco_json
from detectron2.data.datasets.pascal_voc import load_voc_instances, register_pascal_voc
from detectron2.structures import Boxes, Instances

from detection.commands.train_net import main as train_net
from detection.data.sets import detectron2_dicts, source_of
from detection.scoring.boxes import Detections
from detection.scoring.evaluator import SavedPassEvaluator
from kscl.data.annotated.cityscapes import CITYSCAPES_CLASSES, CITYSCAPES_NAMES
from kscl.data.annotated.coco import COCO_NAMES, read_coco
from kscl.data.annotated.voc import VOC_NAMES
from kscl.data.annotations import parse_source, read_source
from kscl.errors import KsclError
from tests.helpers.data.scored_sets import truth_of
from tests.helpers.data.sets import small_coco, small_voc

POLYGON = [1.0, 2.0, 10.0, 2.0, 10.0, 7.0, 1.0, 7.0]
RUNS = {"size": [48, 64], "counts": [50, 5, 48 * 64 - 55]}  # five pixels of the second column
THING = {"image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}


@pytest.fixture(autouse=True)
def catalogs_as_they_were():
    before = dict(DatasetCatalog), dict(MetadataCatalog)
    yield
    for catalog, entries in zip((DatasetCatalog, MetadataCatalog), before, strict=True):
        catalog.clear()
        catalog.update(entries)


@pytest.fixture
def voc(tmp_path):
    return small_voc(tmp_path / "voc")


def test_a_voc_folder_is_read_as_detectron2s_own_loader_reads_it(voc):
    mine = detectron2_dicts(read_source(parse_source(f"voc:{voc}:train"), ["cat", "dog"]))
    theirs = load_voc_instances(str(voc), "train", ["cat", "dog"])
    assert [o.pop("difficult") for d in mine for o in d["annotations"]] == [0, 0, 1, 0]
    assert mine == theirs


def test_png_images_and_images_without_a_size_go_through_detectron2s_mapper(tmp_path):
    root = small_voc(tmp_path, suffix=".png")
    path = root / "Annotations/a.xml"
    path.write_text(path.read_text().replace("<width>64</width><height>48</height>", ""))
    mapper = DatasetMapper(is_train=True, augmentations=[], image_format="RGB")
    dicts = detectron2_dicts(read_source(parse_source(f"voc:{root}:train")))
    mapped = [mapper(image) for image in dicts]
    assert [tuple(item["image"].shape) for item in mapped] == [(3, 48, 64)] * 2
    assert [len(item["instances"]) for item in mapped] == [2, 2]


def test_a_set_that_was_registered_with_detectron2_is_found_by_its_name(voc, tmp_path):
    register_pascal_voc("my pets", str(voc), "train", 2007, ["dog", "cat"])
    found = source_of("my pets")
    assert (found.name, found.format, found.root, found.split) == ("my pets", "voc", voc, "train")
    json_file, images = small_coco(tmp_path / "coco")
    register_coco_instances("my things", {}, str(json_file), str(images))
    found = source_of("my things")
    assert (found.format, found.root, found.annotations) == ("coco", images, json_file)
    DatasetCatalog.register("other", list)
    with pytest.raises(KsclError, match="must be registered as a VOC folder"):
        source_of("other")


def test_our_table_of_built_in_names_is_detectron2s(tmp_path, monkeypatch):
    for name in VOC_NAMES:
        known, source = MetadataCatalog.get(name), parse_source(name)
        assert (str(source.root), source.split) == (known.dirname, known.split)
    for name in COCO_NAMES:
        known, source = MetadataCatalog.get(name), parse_source(name)
        assert (str(source.root), str(source.annotations)) == (known.image_root, known.json_file)
    for name in CITYSCAPES_NAMES:
        known, source = MetadataCatalog.get(name), parse_source(name)
        assert (source.root, source.annotations) == (Path(known.image_dir), Path(known.gt_dir))
        assert list(CITYSCAPES_CLASSES) == known.thing_classes
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))  # after Detectron2 was imported
    assert source_of("voc_2007_test").root == tmp_path / "VOC2007"


@pytest.mark.parametrize("name", ["voc:/only/a/folder", "coco:x.json", "voc:", "", "voc_2012_test"])
def test_a_name_that_is_no_data_set_is_refused_with_the_forms(name):
    with pytest.raises(KsclError, match="voc:FOLDER:SPLIT"):
        parse_source(name)


def coco_with_masks(root):
    """Read a polygon, run lengths and a crowd, all over the left of the first image."""
    annotations = [
        THING | {"id": 1, "segmentation": [POLYGON]},
        THING | {"id": 2, "segmentation": RUNS},
        THING | {"id": 3, "segmentation": RUNS, "iscrowd": 1},
    ]
    json_file, images = small_coco(root, annotations=annotations)
    return read_coco(json_file, images, with_masks=True).checked()


@pytest.mark.parametrize("mask_format", ["bitmask", "polygon"])
def test_masks_reach_detectron2s_mapper_and_crowds_are_left_out(tmp_path, mask_format):
    first, _ = detectron2_dicts(coco_with_masks(tmp_path), crowds=True)
    if mask_format == "polygon":
        del first["annotations"][1]
    mapper = DatasetMapper(
        is_train=True,
        augmentations=[],
        image_format="RGB",
        use_instance_mask=True,
        instance_mask_format=mask_format,
    )
    mapped = mapper(first)["instances"]
    assert mapped.gt_classes.tolist() == [0] * len(mapped)
    if mask_format == "bitmask":
        assert mapped.gt_masks.tensor.sum(dim=(1, 2)).tolist() == [45, 5]
    else:
        assert mapped.gt_masks.polygons[0][0].tolist() == POLYGON


def test_a_coco_file_is_read_as_detectron2s_own_loader_reads_it(tmp_path):
    mine = detectron2_dicts(coco_with_masks(tmp_path), crowds=True)[0]
    theirs = load_coco_json(str(tmp_path / "annotations.json"), str(tmp_path / "images"))[0]
    for ours, other in zip(mine["annotations"], theirs["annotations"], strict=True):
        assert (ours["bbox"], ours["bbox_mode"]) == (other["bbox"], other["bbox_mode"])
        assert ours["iscrowd"] == other.get("iscrowd", 0)
        shape, wanted = ours["segmentation"], other["segmentation"]
        if isinstance(wanted, dict):
            assert list(shape["size"]) == list(wanted["size"])
            assert shape["counts"] == wanted["counts"]
        else:
            assert [part.tolist() for part in shape] == wanted


def test_the_class_list_orders_the_categories_of_a_coco_file(tmp_path):
    json_file, images = small_coco(tmp_path)
    for classes, expected in ((("cat", "dog"), [1, 0]), (("dog", "cat"), [0, 1])):
        first, _ = detectron2_dicts(read_coco(json_file, images, classes).checked(), crowds=True)
        assert [thing["category_id"] for thing in first["annotations"]] == expected


def test_a_benchmarks_object_without_a_usable_polygon_is_not_trained_on(tmp_path):
    annotations = [THING | {"id": 1, "segmentation": [[1, 2, 10, 7]]}]
    json_file, images = small_coco(tmp_path, annotations=annotations)
    first, _ = detectron2_dicts(read_coco(json_file, images, with_masks=True), crowds=True)
    assert first["annotations"] == []


@pytest.mark.parametrize(
    ("size", "words", "images"),
    [
        ((64, 48), ["INPUT.MIN_SIZE_TRAIN", "(0,)"], "ab"),
        ((64, 48), ["INPUT.MIN_SIZE_TEST", "0"], "cd"),
        ((64, 64), ["INPUT.MIN_SIZE_TRAIN", "(0,)", "INPUT.MIN_SIZE_TEST", "0"], ""),
    ],
)
def test_images_smaller_than_the_coarsest_level_of_a_pyramid_are_told_one_by_one(
    tmp_path, capsys, size, words, images
):
    root = small_voc(tmp_path, size=size)
    data = ["DATASETS.TRAIN", f"('voc:{root}:train',)", "DATASETS.TEST", f"('voc:{root}:test',)"]
    config = ["--config-file", "detection/shapes_tiny_fpn.yaml", "--check-later", "MODEL.WEIGHTS"]
    train_net(["--check", *config, *data, "MODEL.ROI_HEADS.NUM_CLASSES", "2", *words])
    found = [it for it in json.loads(capsys.readouterr().out)["problems"] if it["fatal"]]
    assert [it["where"] for it in found] == [f"{root}/JPEGImages/{name}.jpg" for name in images]
    assert all("stride of 64 pixels" in it["what"] for it in found)


def output(boxes, scores, classes):
    instances = Instances((48, 64))
    instances.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
    instances.scores = torch.tensor(scores, dtype=torch.float32)
    instances.pred_classes = torch.tensor(classes, dtype=torch.int64)
    return {"instances": instances}


def test_a_pass_is_saved_in_the_order_of_the_set_and_scored_by_detectron2s_names(voc, tmp_path):
    truth = truth_of(voc, ["cat", "dog", "unicorn"])
    evaluator = SavedPassEvaluator(truth, tmp_path, ("coco-101pt", "voc07-11pt"))
    evaluator.reset()
    for place, image_id in reversed(list(enumerate(truth.image_ids))):
        mine = truth.image == place
        found = output(truth.boxes[mine], [0.9] * mine.sum(), truth.category[mine])
        evaluator.process([{"image_id": image_id}], [found])
    results = evaluator.evaluate()
    assert results["bbox/AP"] == pytest.approx(100)  # the first scorer is the headline
    assert results["bbox/AP-cat"] == pytest.approx(100)
    assert results["voc07-11pt/AP75"] == pytest.approx(100)
    assert "bbox/AP-unicorn" not in results
    saved = Detections.read(tmp_path / "detections.npz")
    assert saved.image_ids == truth.image_ids
    assert list(saved.image) == sorted(saved.image)
    assert saved.ground_truth == truth.fingerprint


def test_a_pass_that_knows_more_classes_is_refused(voc):
    truth = truth_of(voc, ["cat", "dog"])
    evaluator = SavedPassEvaluator(truth)
    for image_id in truth.image_ids:
        evaluator.process([{"image_id": image_id}], [output([[1, 1, 9, 9]], [0.5], [2])])
    with pytest.raises(KsclError, match="category index 2, but there are 2"):
        evaluator.evaluate()
