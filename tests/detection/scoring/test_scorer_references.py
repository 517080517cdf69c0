"""Each scorer agrees with Detectron2 or pycocotools."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets.pascal_voc import register_pascal_voc
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.evaluation import pascal_voc_evaluation as detectron2_voc
from detectron2.structures import Boxes, Instances
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detection.scoring import score, voc07
from detection.scoring.boxes import Detections, GroundTruth, make_detections, make_ground_truth
from detection.scoring.evaluator import SavedPassEvaluator
from detection.scoring.resample import DRAWS
from kscl.data.annotations import AnnotatedSet
from tests.helpers.data.scored_sets import COCO101, VOC, VOC10, annotated, truth_of
from tests.helpers.data.sets import (
    StableNumpy,
    random_detections,
    random_things,
    small_voc,
    write_voc,
)

COCO_FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")


@pytest.fixture
def registered():
    """Registers VOC folders with Detectron2 for one test and forgets them after it."""
    names = []

    def register(root, classes):
        names.append(f"test_{len(names)}_{root}")
        register_pascal_voc(names[-1], str(root), "test", 2007, classes)
        return names[-1]

    yield register
    for name in names:
        DatasetCatalog.remove(name)
        MetadataCatalog.pop(name, None)


@pytest.fixture
def recorded(monkeypatch):
    """Every (class, threshold) AP that Detectron2's evaluator computes."""
    seen = {}
    original = detectron2_voc.voc_eval

    def recording(*arguments, **options):
        result = original(*arguments, **options)
        seen[arguments[3], options["ovthresh"]] = 100.0 * result[2]
        return result

    monkeypatch.setattr(detectron2_voc, "voc_eval", recording)
    return seen


def instances(boxes, scores, category):
    found = Instances((300, 300))
    found.pred_boxes = Boxes(torch.from_numpy(boxes))
    found.scores = torch.from_numpy(scores)
    found.pred_classes = torch.from_numpy(category)
    return {"instances": found}


def by_detectron2(name, detections, year=2007):
    evaluator = detectron2_voc.PascalVOCDetectionEvaluator(name)
    evaluator._is_2007 = year == 2007  # as a set of that year is scored
    evaluator.reset()
    for image_id, found in detections.items():
        evaluator.process([{"image_id": image_id}], [instances(*found)])
    return evaluator.evaluate()["bbox"]


def ours(root, classes, detections, scorer=VOC) -> dict:
    truth = truth_of(root, classes)
    table = make_detections("x", truth.class_names, detections, truth.fingerprint)
    return score(table, truth, (scorer,))[scorer]


def all_aps(truth: GroundTruth, table: Detections, scorer: str, monkeypatch) -> dict:
    """Our AP of every class and threshold, by looking at what is summarized."""
    caught = {}
    monkeypatch.setattr(voc07, "summarize", lambda *given: caught.update(aps=given[2]) or {})
    score(table, truth, (scorer,))
    monkeypatch.undo()
    return {
        (name, threshold): 100.0 * caught["aps"][place, level]
        for place, name in enumerate(truth.class_names)
        for level, threshold in enumerate(voc07.IOU_THRESHOLDS)
    }


@pytest.mark.parametrize(("scorer", "year"), [(VOC, 2007), (VOC10, 2012)])
@pytest.mark.parametrize(("decimals", "runs"), [(8, 3), (1, 3)], ids=["distinct", "many ties"])
def test_voc_scorers_equal_detectron2_in_every_class_and_threshold(
    tmp_path, registered, recorded, decimals, runs, scorer, year
):
    """Each time 3 sets of 6 classes and 10 thresholds: 180 APs, not only their means."""
    classes = [f"class{index}" for index in range(6)]
    compared = 0
    for seed in range(runs):
        rng = np.random.default_rng((seed, decimals))
        things = random_things(rng, 15, len(classes))
        detections = random_detections(rng, things, len(classes), decimals=decimals)
        root = write_voc(
            tmp_path / str(seed), {"test": list(things)}, things, images=False, size=(300, 300)
        )
        name = registered(root, classes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detectron2_voc, "np", StableNumpy())
            theirs = by_detectron2(name, detections, year)
        truth = truth_of(root, classes)
        table = make_detections(name, truth.class_names, detections)
        result = score(table, truth, (scorer,))[scorer]
        for key in ("AP", "AP50", "AP75"):
            assert result[key] == pytest.approx(theirs[key], abs=1e-6)
        with pytest.MonkeyPatch.context() as patch:
            mine = all_aps(truth, table, scorer, patch)
        assert set(mine) == set(recorded)
        for case, value in mine.items():
            assert value == pytest.approx(recorded[case], abs=1e-6), (seed, case)
        compared += len(mine)
        recorded.clear()
    assert compared >= 180


def test_voc07_equals_detectron2_as_it_is_where_no_two_scores_round_alike(tmp_path, registered):
    rng = np.random.default_rng(5)
    things = random_things(rng, 40, 3)
    detections = random_detections(rng, things, 3, most=15)
    ranks = iter(rng.permutation(1000))
    detections = {
        image: (boxes, np.array([next(ranks) / 1000 for _ in scores], np.float32), category)
        for image, (boxes, scores, category) in detections.items()
    }
    root = write_voc(
        tmp_path / "voc", {"test": list(things)}, things, images=False, size=(300, 300)
    )
    classes = ["class0", "class1", "class2"]
    theirs = by_detectron2(registered(root, classes), detections)
    mine = ours(root, classes, detections)
    assert {key: mine[key] for key in theirs} == pytest.approx(theirs, abs=1e-6)


def test_a_real_pass_is_saved_and_scores_as_detectron2_scores_it(tmp_path, registered, monkeypatch):
    """A Faster R-CNN with random weights; some of what it sees is then declared to be true."""
    monkeypatch.setattr(detectron2_voc, "np", StableNumpy())
    model, loader = tiny_detector(tmp_path / "voc", registered)
    truth = truth_of(tmp_path / "voc", ["cat", "dog"])
    evaluator = SavedPassEvaluator(truth, tmp_path / "out")
    results = inference_on_dataset(model, loader, evaluator)
    saved = Detections.read(tmp_path / "out" / "detections.npz")
    again = score(saved, GroundTruth.read(tmp_path / "out" / "ground_truth.npz"))
    assert list(again) == [VOC, VOC10, COCO101]
    resampled = evaluator.scores[VOC].pop("resampled_AP")
    assert len(resampled) == DRAWS
    assert again == evaluator.scores
    assert results["bbox/AP"] == again[VOC]["AP"]
    assert results[f"{COCO101}/AP50"] == again[COCO101]["AP50"]

    detections = {
        image: tuple(
            column[saved.image == place] for column in (saved.boxes, saved.scores, saved.category)
        )
        for place, image in enumerate(saved.image_ids)
    }
    things = {
        image: [
            (saved.class_names[c], tuple(int(v) for v in np.rint(box) + 1), int(place % 5 == 4))
            for place, (box, c) in enumerate(zip(boxes[::3], category[::3], strict=True))
        ]
        for image, (boxes, _, category) in detections.items()
    }
    root = write_voc(tmp_path / "true", {"test": list(things)}, things, images=False, size=(99, 99))
    theirs = by_detectron2(registered(root, ["cat", "dog"]), detections)
    mine = ours(root, ["cat", "dog"], detections)
    assert 5 < theirs["AP"] < 95
    assert {key: mine[key] for key in theirs} == pytest.approx(theirs, abs=1e-6)


def tiny_detector(root, registered):
    from detectron2.config import get_cfg
    from detectron2.data import build_detection_test_loader
    from detectron2.modeling import build_model

    name = registered(small_voc(root), ["cat", "dog"])
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    cfg.MODEL.RESNETS.NORM = "GN"  # random weights stay finite under it
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 128
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 32
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = 25
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[16, 32]]
    cfg.INPUT.MIN_SIZE_TEST = 48
    cfg.DATASETS.TEST = (name,)
    cfg.DATALOADER.NUM_WORKERS = 0
    torch.manual_seed(0)
    return build_model(cfg), build_detection_test_loader(cfg, name)


def reference_coco(truth: AnnotatedSet, detections: dict) -> list[float]:
    """pycocotools on JSON-like dicts made here, from the annotated set and not from our tables."""
    categories = {name: index + 1 for index, name in enumerate(truth.class_names)}
    images = {image.id: index + 1 for index, image in enumerate(truth.images)}
    entries = [
        {
            "image_id": images[image.id],
            "category_id": categories[o.name],
            "iscrowd": int(o.difficult),
        }
        | {"bbox": [o.box[0], o.box[1], o.box[2] - o.box[0], o.box[3] - o.box[1]]}
        | {"area": o.area or (o.box[2] - o.box[0]) * (o.box[3] - o.box[1])}
        for image in truth.images
        for o in image.objects
    ]
    results = [
        {"image_id": images[image], "category_id": int(c) + 1, "score": float(s)}
        | {"bbox": [float(v) for v in (b[0], b[1], b[2] - b[0], b[3] - b[1])]}
        for image, (boxes, scores, category) in detections.items()
        for b, s, c in zip(boxes, scores, category, strict=True)
    ]
    api = COCO()
    api.dataset = {
        "images": [{"id": index} for index in images.values()],
        "categories": [{"id": index} for index in categories.values()],
        "annotations": [entry | {"id": row + 1} for row, entry in enumerate(entries)],
    }
    with redirect_stdout(io.StringIO()):
        api.createIndex()
        evaluation = COCOeval(api, api.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * value for value in evaluation.stats[:9]]


@pytest.mark.parametrize("with_area", [False, True], ids=["box area", "mask area"])
def test_coco101_equals_pycocotools_at_every_size(with_area):
    """Two times 20 sets and 9 figures each: 360 APs and recalls."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        classes = [f"class{index}" for index in range(4)]
        things = random_things(rng, 15, len(classes))
        detections = random_detections(rng, things, len(classes), most=12, decimals=2)
        truth = annotated(things, classes, with_area)
        theirs = reference_coco(truth, detections)
        mine = score(
            make_detections("random", truth.class_names, detections),
            make_ground_truth(truth),
            (COCO101,),
        )[COCO101]
        for name, value in zip(COCO_FIGURES, theirs, strict=True):
            assert (mine[name] if mine[name] is not None else -100) == pytest.approx(
                value, abs=1e-9
            )


def test_coco101_equals_detectron2s_coco_evaluator_without_difficult_objects(tmp_path, registered):
    rng = np.random.default_rng(3)
    things = {
        image: [(name, box, 0) for name, box, _ in found]
        for image, found in random_things(rng, 20, 3).items()
    }
    detections = random_detections(rng, things, 3, most=10)
    root = write_voc(tmp_path / "voc", {"test": list(things)}, things, size=(300, 300))
    classes = ["class0", "class1", "class2"]
    name = registered(root, classes)
    evaluator = COCOEvaluator(name, ("bbox",), False, output_dir=str(tmp_path), use_fast_impl=False)
    evaluator.reset()
    for image_id, found in detections.items():
        evaluator.process([{"image_id": image_id}], [instances(*found)])
    with redirect_stdout(io.StringIO()):
        theirs = evaluator.evaluate()["bbox"]
    mine = ours(root, classes, detections, COCO101)
    for key in ("AP", "AP50", "AP75", "APs", "APm", "APl"):
        assert mine[key] == pytest.approx(theirs[key], abs=1e-6)
    for label, row in mine["per_class"].items():
        assert row["AP"] == pytest.approx(theirs[f"AP-{label}"], abs=1e-6)
