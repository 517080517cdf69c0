"""Data sets in Detectron2's catalogs, and the evaluator that passes over them."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.common import DatasetFromList, MapDataset
from detectron2.data.dataset_mapper import DatasetMapper
from detectron2.data.datasets.pascal_voc import load_voc_instances
from detectron2.structures import Boxes, BoxMode, Instances

from detection.data.catalog import (
    ground_truth_of,
    register_coco_json,
    register_datasets,
    register_voc_folder,
    source_of,
)
from detection.scoring.boxes import make_ground_truth, read_detections
from detection.scoring.evaluator import SavedPassEvaluator
from kscl.data.annotated.cityscapes import CITYSCAPES_CLASSES, CITYSCAPES_NAMES
from kscl.data.annotated.coco import COCO_NAMES
from kscl.data.annotated.voc import VOC_NAMES
from kscl.data.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet, parse_source
from kscl.errors import KsclError
from tests.helpers.data.sets import small_coco, small_voc, write_voc


@pytest.fixture
def voc(tmp_path):
    return small_voc(tmp_path / "voc")


def test_a_voc_folder_loads_as_detectron2s_own_loader_loads_it(voc):
    register_voc_folder("pets", voc, "train")
    mine = DatasetCatalog.get("pets")
    theirs = load_voc_instances(str(voc), "train", ["cat", "dog"])
    assert [o.pop("difficult") for d in mine for o in d["annotations"]] == [0, 0, 1, 0]
    assert mine == theirs
    known = MetadataCatalog.get("pets")
    assert known.thing_classes == ["cat", "dog"]
    assert (known.evaluator_type, known.year, known.split) == ("pascal_voc", 2007, "train")


def test_png_images_and_images_without_a_size_go_through_detectron2s_mapper(tmp_path):
    root = small_voc(tmp_path, suffix=".png")
    path = root / "Annotations/a.xml"
    path.write_text(path.read_text().replace("<width>64</width><height>48</height>", ""))
    register_voc_folder("pngs", root, "train")
    mapper = DatasetMapper(is_train=True, augmentations=[], image_format="RGB")
    mapped = MapDataset(DatasetFromList(DatasetCatalog.get("pngs")), mapper)
    assert [tuple(item["image"].shape) for item in mapped] == [(3, 48, 64)] * 2
    assert [len(item["instances"]) for item in mapped] == [2, 2]


def test_names_in_a_config_are_registered_with_one_class_list(voc):
    train, test = f"voc:{voc}:train", f"voc:{voc}:test"
    assert register_datasets([train], [test]) == ("cat", "dog")
    assert register_datasets([train], [test]) == ("cat", "dog")  # a second trial in this process
    assert len(DatasetCatalog.get(test)) == 2
    assert MetadataCatalog.get(train).thing_classes == MetadataCatalog.get(test).thing_classes
    with pytest.raises(KsclError, match="another folder or class list"):
        register_datasets([train], [test], ["cat", "dog", "bird"])


def test_a_set_registered_under_a_name_of_ones_own_can_be_used_in_a_config(voc):
    register_voc_folder("my_pets", voc, "train", ["dog", "cat"])
    assert source_of("my_pets").root == voc
    assert register_datasets(["my_pets"], [], ["dog", "cat"]) == ("dog", "cat")
    assert ground_truth_of("my_pets").class_names == ("dog", "cat")


def test_built_in_names_are_found_below_detectron2_datasets_even_if_it_is_set_late(
    tmp_path, monkeypatch
):
    things = {"a": [("cat", (1, 1, 20, 20), 0)], "b": [("dog", (1, 1, 20, 20), 0)]}
    root = write_voc(tmp_path / "VOC2007", {"trainval": ["a"], "test": ["b"]}, things)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    classes = register_datasets(["voc_2007_trainval"], ["voc_2007_test"])
    assert len(classes) == 20
    (found,) = DatasetCatalog.get("voc_2007_test")
    assert found["file_name"] == str(root / "JPEGImages/b.jpg")
    assert found["annotations"][0]["category_id"] == classes.index("dog")
    assert MetadataCatalog.get("voc_2007_test").year == 2007
    assert ground_truth_of("voc_2007_test").image_ids == ("b",)


def test_a_built_in_entry_that_fits_is_left_as_detectron2_made_it(monkeypatch):
    root = parse_source("voc_2007_test").root
    before = DatasetCatalog["voc_2007_test"]
    assert MetadataCatalog.get("voc_2007_test").dirname == str(root)
    register_datasets(["voc_2007_trainval", "voc_2012_trainval"], ["voc_2007_test"])
    assert DatasetCatalog["voc_2007_test"] is before


def test_our_table_of_built_in_names_is_detectron2s():
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


@pytest.mark.parametrize("name", ["voc:/only/a/folder", "coco:x.json", "voc:", "", "voc_2012_test"])
def test_a_name_that_is_no_data_set_is_refused_with_the_forms(name):
    with pytest.raises(KsclError, match="voc:FOLDER:SPLIT"):
        parse_source(name)


def test_a_coco_file_is_registered_with_contiguous_classes_and_masks(tmp_path):
    json_file, images = small_coco(tmp_path)
    register_coco_json("things", json_file, images)
    first, second = DatasetCatalog.get("things")
    assert [o["category_id"] for o in first["annotations"]] == [1, 0]  # dog 18, cat 3
    assert second["annotations"][0]["iscrowd"] == 1
    known = MetadataCatalog.get("things")
    assert known.thing_dataset_id_to_contiguous_id == {3: 0, 18: 1}
    truth = ground_truth_of("things")
    assert truth.image_ids == ("7", "8")
    box = first["annotations"][0]
    xyxy = BoxMode.convert(box["bbox"], box["bbox_mode"], BoxMode.XYXY_ABS)
    assert list(truth.boxes[0]) == list(xyxy)


def test_a_given_class_list_orders_a_coco_files_categories(tmp_path):
    json_file, images = small_coco(tmp_path)
    name = f"coco:{json_file}:{images}"
    assert register_datasets([name], [], ["dog", "cat"]) == ("dog", "cat")
    assert [o["category_id"] for o in DatasetCatalog.get(name)[0]["annotations"]] == [0, 1]
    register_coco_json("dogs only", json_file, images, ["dog"])
    with pytest.raises(KsclError, match="category 3"):
        DatasetCatalog.get("dogs only")
    with pytest.raises(KsclError, match="cannot be read"):
        register_coco_json("x", tmp_path / "no.json", images)


def test_loading_a_bad_set_is_our_error_with_every_problem(voc):
    (voc / "Annotations/a.xml").write_text("<annotation>")
    (voc / "JPEGImages/b.jpg").unlink()
    register_voc_folder("broken", voc, "train", ["cat", "dog"])
    with pytest.raises(KsclError) as error:
        DatasetCatalog.get("broken")
    assert "a.xml" in str(error.value)
    assert "JPEGImages/b" in str(error.value)
    with pytest.raises(KsclError, match="no split"):
        register_voc_folder("no", voc, "nothing")


def test_a_set_of_another_kind_is_not_scored(voc):
    DatasetCatalog.register("other", list)
    with pytest.raises(KsclError, match="neither as a VOC folder"):
        source_of("other")


def found(boxes, scores, classes):
    instances = Instances((48, 64))
    instances.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
    instances.scores = torch.tensor(scores, dtype=torch.float32)
    instances.pred_classes = torch.tensor(classes, dtype=torch.int64)
    return {"instances": instances}


def perfect_pass(evaluator, truth, skip=()):
    evaluator.reset()
    for place, image_id in enumerate(truth.image_ids):
        if image_id in skip:
            continue
        mine = truth.image == place
        output = found(truth.boxes[mine], [0.9] * mine.sum(), truth.category[mine])
        evaluator.process([{"image_id": image_id}], [output])


def test_the_evaluator_gives_what_detectron2_users_expect(voc, tmp_path):
    register_voc_folder("pets", voc, "test", ["cat", "dog", "unicorn"])
    evaluator = SavedPassEvaluator("pets", tmp_path / "out", ("coco-101pt", "voc07-11pt"))
    perfect_pass(evaluator, ground_truth_of("pets"))
    results = evaluator.evaluate()
    assert list(results) == ["bbox", "voc07-11pt"]  # the first scorer is the headline
    assert results["bbox"]["AP"] == pytest.approx(100)
    assert results["bbox"]["AP-cat"] == pytest.approx(100)
    assert np.isnan(results["bbox"]["AP-unicorn"])
    assert results["voc07-11pt"]["AP75"] == pytest.approx(100)


def test_a_pass_that_missed_an_image_or_knows_more_classes_is_refused(voc):
    register_voc_folder("pets", voc, "test")
    evaluator = SavedPassEvaluator("pets")
    truth = ground_truth_of("pets")
    perfect_pass(evaluator, truth, skip=("d",))
    with pytest.raises(KsclError, match="saw 1 of its 2 images"):
        evaluator.evaluate()
    perfect_pass(evaluator, truth)
    evaluator.process([{"image_id": "d"}], [found([[1, 1, 9, 9]], [0.5], [2])])
    with pytest.raises(KsclError, match="category index 2, but there are 2"):
        evaluator.evaluate()


def test_a_bad_test_set_is_told_before_the_pass_and_not_after_it(voc):
    register_voc_folder("pets", voc, "test", ["cat", "dog"])
    (voc / "Annotations/c.xml").write_text("<annotation>")
    with pytest.raises(KsclError, match="well-formed"):
        SavedPassEvaluator("pets")


IDS = tuple("abcdef")


def truth_of_six():
    thing = AnnotatedObject("cat", (0.0, 0.0, 20.0, 20.0))
    images = [AnnotatedImage(image_id, None, 64, 48, (thing,), "made here") for image_id in IDS]
    return make_ground_truth(AnnotatedSet("six", ("cat",), images))


def pass_over(image_ids, output_dir):
    """Equal scores everywhere, so that only the order of images decides who is first."""
    evaluator = SavedPassEvaluator("six", output_dir, ground_truth=truth_of_six())
    evaluator.reset()
    for place, image_id in enumerate(image_ids):
        boxes = [[0, 0, 20, 20 - 3 * place], [40, 0, 60, 20]]
        evaluator.process([{"image_id": image_id}], [found(boxes, [0.5, 0.5], [0, 0])])
    return evaluator.evaluate(), evaluator


def one_of_two_ranks(rank, port, folder):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    # Interleaved, as a sampler may deal them out; each rank sees three images.
    results, _ = pass_over(IDS[rank::2], folder)
    assert (results is None) == (rank == 1)
    torch.distributed.destroy_process_group()


def test_two_ranks_save_one_pass_in_the_order_of_the_set(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two_ranks, (port, tmp_path), nprocs=2)
    saved = read_detections(tmp_path / "detections.npz")
    assert saved.image_ids == IDS
    assert list(saved.image) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert saved.ground_truth == truth_of_six().fingerprint
    heights = saved.boxes[::2, 3]
    assert list(heights) == [20, 20, 17, 17, 14, 14]
