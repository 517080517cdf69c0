"""The scorers against Detectron2's evaluator and pycocotools, on thousands of random cases."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.evaluation import pascal_voc_evaluation as detectron2_voc
from detectron2.structures import Boxes, Instances
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from detection.commands.score import main as score_command
from detection.data.catalog import ground_truth_of, register_voc_folder
from detection.scoring import as_table, metrics_of, score, voc07
from detection.scoring.boxes import (
    Detections,
    GroundTruth,
    make_detections,
    make_ground_truth,
    read_detections,
    read_ground_truth,
    write_table,
)
from detection.scoring.evaluator import SavedPassEvaluator
from kscl.data.annotated.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet
from kscl.data.annotated.coco import read_coco
from kscl.errors import KsclError
from tests.helpers.commands import run, tool
from tests.helpers.voc_sets import (
    StableNumpy,
    random_detections,
    random_things,
    small_coco,
    small_voc,
    write_voc,
)

COCO_FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")
VOC, VOC10, COCO101 = "voc07-11pt", "voc10-every-point", "coco-101pt"


@pytest.fixture
def registered():
    """Registers VOC folders for one test and forgets them after it."""
    names = []

    def register(root, classes, split="test"):
        name = f"test_{len(names)}_{root}"
        register_voc_folder(name, root, split, classes)
        names.append(name)
        return name

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


def ours(name, detections, scorer=VOC) -> dict:
    truth = ground_truth_of(name)
    table = make_detections(name, truth.class_names, detections, truth.fingerprint)
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
@pytest.mark.parametrize(("decimals", "runs"), [(8, 10), (1, 10)], ids=["distinct", "many ties"])
def test_voc_scorers_equal_detectron2_in_every_class_and_threshold(
    tmp_path, registered, recorded, decimals, runs, scorer, year
):
    """Each time 10 sets of 6 classes and 10 thresholds: 600 APs, not only their means."""
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
        truth = ground_truth_of(name)
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
    assert compared >= 600


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
    name = registered(root, ["class0", "class1", "class2"])
    theirs, mine = by_detectron2(name, detections), ours(name, detections)
    assert {key: mine[key] for key in theirs} == pytest.approx(theirs, abs=1e-6)


def test_a_real_pass_is_saved_and_scores_as_detectron2_scores_it(tmp_path, registered, monkeypatch):
    """A Faster R-CNN with random weights; some of what it sees is then declared to be true."""
    monkeypatch.setattr(detectron2_voc, "np", StableNumpy())
    model, loader, name = tiny_detector(tmp_path, registered)
    evaluator = SavedPassEvaluator(name, tmp_path / "out")
    results = inference_on_dataset(model, loader, evaluator)
    saved = read_detections(tmp_path / "out" / "detections.npz")
    again = score(saved, read_ground_truth(tmp_path / "out" / "ground_truth.npz"))
    assert list(again) == [VOC, VOC10, COCO101]
    assert again == evaluator.scores
    assert results["bbox"]["AP"] == again[VOC]["AP"]
    assert results[COCO101]["AP50"] == again[COCO101]["AP50"]

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
    name = registered(root, ["cat", "dog"])
    theirs, mine = by_detectron2(name, detections), ours(name, detections)
    assert 5 < theirs["AP"] < 95
    assert {key: mine[key] for key in theirs} == pytest.approx(theirs, abs=1e-6)


def tiny_detector(tmp_path, registered):
    from detectron2.config import get_cfg
    from detectron2.data import build_detection_test_loader
    from detectron2.modeling import build_model

    root = small_voc(tmp_path / "voc")
    name = registered(root, ["cat", "dog"])
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
    return build_model(cfg), build_detection_test_loader(cfg, name), name


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


def annotated(things, classes, with_area=False) -> AnnotatedSet:
    images = []
    for image_id, found in things.items():
        objects = tuple(
            AnnotatedObject(
                name,
                (box[0] - 1.0, box[1] - 1.0, float(box[2]), float(box[3])),
                bool(difficult),
                area=50.0 * place if with_area else None,
            )
            for place, (name, box, difficult) in enumerate(found, 1)
        )
        images.append(AnnotatedImage(image_id, None, 300, 300, objects, "made here"))
    return AnnotatedSet("random", tuple(classes), images)


@pytest.mark.parametrize("with_area", [False, True], ids=["box area", "mask area"])
def test_coco101_equals_pycocotools_at_every_size(with_area):
    """Two times 100 sets and 9 figures each: 1,800 APs and recalls."""
    for seed in range(100):
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
    name = registered(root, ["class0", "class1", "class2"])
    evaluator = COCOEvaluator(name, ("bbox",), False, output_dir=str(tmp_path), use_fast_impl=False)
    evaluator.reset()
    for image_id, found in detections.items():
        evaluator.process([{"image_id": image_id}], [instances(*found)])
    with redirect_stdout(io.StringIO()):
        theirs = evaluator.evaluate()["bbox"]
    mine = ours(name, detections, COCO101)
    for key in ("AP", "AP50", "AP75", "APs", "APm", "APl"):
        assert mine[key] == pytest.approx(theirs[key], abs=1e-6)
    for label, row in mine["per_class"].items():
        assert row["AP"] == pytest.approx(theirs[f"AP-{label}"], abs=1e-6)


boxes = st.tuples(*[st.integers(0, 40)] * 2, *[st.integers(1, 40)] * 2)
truths = st.lists(st.tuples(boxes, st.booleans()), min_size=1, max_size=6)
finds = st.lists(st.tuples(boxes, st.integers(0, 5)), max_size=12)


def plain_voc07(truth, found) -> list[float]:
    """The definition for one class in one image, one detection at a time."""
    results = []
    easy = sum(not difficult for _, difficult in truth)
    ranked = sorted(found, key=lambda item: -item[1])  # sorted() keeps the order of equals
    for percent in range(50, 100, 5):
        taken, marks = set(), []
        for (x, y, w, h), _ in ranked:
            overlaps = []
            for (a, b, c, d), _ in truth:
                across = min(x + w, a + c) - max(x, a)
                down = min(y + h, b + d) - max(y, b)
                shared = max(across, 0) * max(down, 0)
                overlaps.append(shared / (w * h + c * d - shared))
            best = overlaps.index(max(overlaps))
            if overlaps[best] <= percent / 100:
                marks.append(0)
            elif not truth[best][1]:
                marks.append(int(best not in taken))
                taken.add(best)
        points = [
            (sum(marks[:end]) / easy, sum(marks[:end]) / end) for end in range(1, len(marks) + 1)
        ]
        levels = np.arange(0.0, 1.1, 0.1)
        best_from = [max((p for r, p in points if r >= level), default=0) for level in levels]
        results.append(100 * sum(best_from) / 11)
    return results


def test_every_point_ap_is_the_area_under_the_envelope_by_hand():
    """Hit, miss, hit of three objects: precisions 1, 1/2, 2/3 at recalls 1/3, 1/3, 2/3."""
    things = tuple(AnnotatedObject("x", (20.0 * i, 0.0, 20.0 * i + 9, 9.0)) for i in range(3))
    image = AnnotatedImage("one", None, 100, 100, things, "made here")
    boxes = np.array([things[0].box, (80, 80, 90, 90), things[1].box], np.float32)
    found = {"one": (boxes, np.array([0.9, 0.8, 0.7], np.float32), np.zeros(3, int))}
    truth = make_ground_truth(AnnotatedSet("one", ("x",), [image]))
    result = score(make_detections("one", ("x",), found), truth, (VOC10,))[VOC10]
    assert result["AP50"] == pytest.approx(100 * (1 / 3 * 1 + 1 / 3 * 2 / 3))


@given(truth=truths.filter(lambda t: not all(d for _, d in t)), found=finds)
@settings(max_examples=250, deadline=None)
def test_voc07_equals_the_definition_written_out(truth, found):
    objects = tuple(
        AnnotatedObject("thing", (x, y, x + w, y + h), difficult)
        for (x, y, w, h), difficult in truth
    )
    image = AnnotatedImage("one", None, 100, 100, objects, "made here")
    corners = np.array([(x, y, x + w, y + h) for (x, y, w, h), _ in found], np.float32)
    detections = make_detections(
        "one",
        ("thing",),
        {
            "one": (
                corners.reshape(-1, 4),
                np.array([level / 5 for _, level in found], np.float32),
                np.zeros(len(found), int),
            )
        },
    )
    mine = score(detections, make_ground_truth(AnnotatedSet("one", ("thing",), [image])), (VOC,))[
        VOC
    ]
    expected = plain_voc07(truth, found)
    assert mine["AP"] == pytest.approx(np.mean(expected), abs=1e-9)
    assert mine["AP50"] == pytest.approx(expected[0], abs=1e-9)
    assert mine["AP75"] == pytest.approx(expected[5], abs=1e-9)


def perfect(truth: GroundTruth, classes=None) -> Detections:
    return Detections(
        dataset=truth.dataset,
        class_names=classes or truth.class_names,
        image_ids=truth.image_ids,
        image=truth.image,
        category=truth.category,
        boxes=truth.boxes.astype(np.float32),
        scores=np.ones(len(truth), np.float32),
    )


@pytest.fixture
def small(tmp_path, registered):
    root = small_voc(tmp_path / "voc")
    return ground_truth_of(registered(root, ["cat", "dog"]))


def test_a_class_without_test_objects_is_left_out_of_the_mean_and_named(tmp_path, registered):
    root = small_voc(tmp_path / "voc")
    truth = ground_truth_of(registered(root, ["cat", "dog", "unicorn"]))
    for scorer, result in score(perfect(truth), truth).items():
        assert result["AP"] == pytest.approx(100), scorer  # Detectron2 says 66.7
        assert result["absent_classes"] == ["unicorn"]
        assert set(result["per_class"]) == {"cat", "dog"}


def test_a_class_with_difficult_objects_only_is_absent_too(tmp_path, registered):
    things = {"x": [("cat", (1, 1, 20, 20), 0), ("dog", (5, 5, 30, 30), 1)]}
    root = write_voc(tmp_path / "voc", {"test": ["x"]}, things)
    truth = ground_truth_of(registered(root, ["cat", "dog"]))
    for result in score(perfect(truth), truth).values():
        assert result["absent_classes"] == ["dog"]
        assert result["AP"] == pytest.approx(100)


def test_no_detection_at_all_is_zero_and_nothing_to_find_is_an_error(small):
    none = make_detections("x", small.class_names, {i: empty() for i in small.image_ids})
    for result in score(none, small).values():
        assert (result["AP"], result["AP50"]) == (0, 0)
    all_difficult = GroundTruth(**vars_of(small) | {"difficult": np.ones(len(small), bool)})
    with pytest.raises(KsclError, match="nothing to score"):
        score(none, all_difficult)


def empty():
    return np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, int)


def vars_of(table):
    return {name: getattr(table, name) for name in table.__dataclass_fields__}


def test_the_order_of_images_and_classes_in_the_file_does_not_matter():
    rng = np.random.default_rng(1)
    things = random_things(rng, 20, 3)
    truth = make_ground_truth(annotated(things, ["class0", "class1", "class2"]))
    detections = random_detections(rng, things, 3, decimals=1)
    one = score(make_detections("x", truth.class_names, detections), truth)
    swapped = {
        image: (boxes, scores, np.array([2, 0, 1])[category])
        for image, (boxes, scores, category) in reversed(detections.items())
    }
    other = score(make_detections("x", ("class1", "class2", "class0"), swapped), truth)
    assert one == other


def test_large_sets_are_compared_in_parts_with_the_same_result(monkeypatch):
    rng = np.random.default_rng(2)
    things = random_things(rng, 30, 2)
    truth = make_ground_truth(annotated(things, ["class0", "class1"]))
    table = make_detections("x", truth.class_names, random_detections(rng, things, 2))
    whole = score(table, truth, (VOC,))
    monkeypatch.setattr(voc07, "PAIRS_AT_ONCE", 7)
    assert score(table, truth, (VOC,)) == whole


def test_curves_fall_from_left_to_right_and_agree_with_the_ap(small):
    result = score(perfect(small), small)
    for scorer in (VOC, COCO101):
        curves = result[scorer]["curves"]
        assert len(curves["recall"]) == 101
        for row in curves["precision"].values():
            assert np.all(np.diff(row["AP50"]) <= 0)
            assert np.mean(row["AP50"]) == pytest.approx(1, abs=0.01)


def test_results_are_plain_json_and_give_finite_metrics(small):
    result = score(perfect(small), small)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    metrics = metrics_of(result, COCO101)
    assert metrics["AP"] == result[COCO101]["AP"]
    assert metrics["voc07-11pt/AP50"] == result[VOC]["AP50"]
    assert all(np.isfinite(value) for value in metrics.values())
    assert "cat" in as_table(result)


def test_detections_of_other_images_classes_or_annotations_are_refused(small):
    found = perfect(small)
    few = make_detections("x", small.class_names, {small.image_ids[0]: empty()})
    with pytest.raises(KsclError, match="image names 1 only annotated"):
        score(few, small)
    with pytest.raises(KsclError, match="class names"):
        score(perfect(small, ("cat", "horse")), small)
    with pytest.raises(KsclError, match="no scorer"):
        score(found, small, ("voc12",))
    then = Detections(**vars_of(found) | {"ground_truth": "0123456789abcdef"})
    with pytest.raises(KsclError, match="have changed"):
        score(then, small)
    assert score(then, small, same_annotations=False)[VOC]["AP"] == pytest.approx(100)


def test_annotations_edited_between_two_evaluations_count_at_once(tmp_path, registered):
    """Detectron2 keeps the first reading of a file for as long as the process lives."""
    root = small_voc(tmp_path / "voc")
    name = registered(root, ["cat", "dog"])
    before = ground_truth_of(name)
    file = root / "Annotations" / "c.xml"
    file.write_text(file.read_text().replace("<xmax>20</xmax>", "<xmax>60</xmax>"))
    after = ground_truth_of(name)
    assert before.fingerprint != after.fingerprint
    assert score(perfect(before), after)[VOC]["AP"] < 100


def test_a_saved_pass_comes_back_to_the_bit(tmp_path, small):
    found = perfect(small)
    for table, read in ((found, read_detections), (small, read_ground_truth)):
        path = write_table(table, tmp_path / "boxes.npz")
        first = path.read_bytes()
        back = read(path)
        for name, value in vars_of(table).items():
            assert np.array_equal(getattr(back, name), value)
        assert write_table(back, path).read_bytes() == first
    assert read_ground_truth(tmp_path / "boxes.npz").fingerprint == small.fingerprint


def damaged(path, table, **changes):
    write_table(table, path)
    content = {**np.load(path)} | {key: np.array(value) for key, value in changes.items()}
    np.savez(path, **{key: value for key, value in content.items() if value.ndim or value.item()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a file of detections"),
        ({"kind": "ground truth"}, "holds ground truth"),
        ({"version": 9}, "newer release"),
        ({"scores": np.zeros(2, np.float32)}, "shape"),
        ({"boxes": np.zeros((4, 4))}, "float64"),
        ({"image": np.full(4, 9)}, "image index 9"),
        ({"category": np.full(4, -1)}, "category index -1"),
        ({"scores": np.full(4, np.nan, np.float32)}, "finite"),
        ({"boxes": np.tile(np.float32([5, 5, 1, 1]), (4, 1))}, "ends before"),
        ({"image_ids": ["c", "c"]}, "twice"),
        ({"scores": 0}, "missing"),
        ({"class_names": np.array([{}], object)}, "not readable"),
    ],
)
def test_a_file_that_is_not_a_good_pass_is_refused_by_name(tmp_path, small, changes, message):
    truth = GroundTruth(**vars_of(small) | {"dataset": "x"})
    found = perfect(truth)
    assert len(found) == 3
    found = Detections(**vars_of(found) | {k: np.concatenate([v, v[:1]]) for k, v in rows(found)})
    path = tmp_path / "bad.npz"
    damaged(path, found, **changes)
    with pytest.raises(KsclError, match=message) as error:
        read_detections(path)
    assert str(path) in str(error.value)


def rows(table):
    return [(name, getattr(table, name)) for name in ("image", "category", "boxes", "scores")]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no more", b"\x93NUMPY", b"text"])
def test_a_broken_or_missing_file_is_an_error_and_no_traceback(tmp_path, content):
    path = tmp_path / "broken.npz"
    with pytest.raises(KsclError, match="no such file"):
        read_detections(path)
    path.write_bytes(content)
    with pytest.raises(KsclError, match="not readable"):
        read_detections(path)


@pytest.mark.parametrize("where", ["{voc}", "{voc}:test", "voc:{voc}:test", "{truth}"])
def test_annotations_are_named_as_a_folder_a_split_or_the_saved_file(
    tmp_path, small, capsys, where
):
    found, truth = tmp_path / "detections.npz", tmp_path / "truth.npz"
    write_table(perfect(small), found)
    write_table(small, truth)
    where = where.format(voc=tmp_path / "voc", truth=truth)
    assert score_command(["--detections", str(found), "--annotations", where, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = {name: round(row["AP50"]) for name, row in result.items()}
    assert found == {VOC: 100, VOC10: 100, COCO101: 100}


def test_a_coco_file_scores_without_its_images(tmp_path, capsys):
    json_file, _ = small_coco(tmp_path)
    truth = make_ground_truth(read_coco(json_file))
    found = write_table(perfect(truth), tmp_path / "detections.npz")
    arguments = ["--detections", str(found), "--annotations", str(json_file), "--scorer", COCO101]
    assert score_command(arguments) == 0
    printed = capsys.readouterr().out
    assert "AP by size: small 100.00" in printed
    assert VOC not in printed


def test_the_tool_says_what_is_wrong_and_needs_no_detectron2(tmp_path, small):
    found = write_table(perfect(small), tmp_path / "detections.npz")
    done = tool("score", "--detections", found, "--annotations", f"{tmp_path / 'voc'}:train")
    assert done.returncode == 2
    assert "do not belong" in done.stderr
    assert "Traceback" not in done.stderr
    code = (
        "import sys; sys.modules['detectron2'] = None\n"
        "import detection.commands.score, kscl.data.annotated.voc, detection.commands.preflight\n"
        "assert 'torch' not in sys.modules"
    )
    assert run(sys.executable, "-c", code).returncode == 0
