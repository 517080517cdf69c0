"""The scorers against Detectron2's evaluator and pycocotools, on thousands of random cases."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detection.commands.score import main as score_command
from detection.scoring import as_table, metrics_of, score, voc07
from detection.scoring.boxes import (
    Detections,
    GroundTruth,
    make_detections,
    make_ground_truth,
    write_table,
)
from detection.scoring.resample import DRAWS, RESAMPLED, draws, resampled_ap
from kscl.data.annotated.coco import read_coco
from kscl.data.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet
from kscl.errors import KsclError
from tests.helpers.data.scored_sets import COCO101, VOC, VOC10, annotated, truth_of
from tests.helpers.data.sets import (
    random_detections,
    random_things,
    small_coco,
    small_voc,
    write_voc,
)

IMAGES, CLASSES = 12, ("class0", "class1", "class2")
boxes = st.tuples(*[st.integers(0, 40)] * 2, *[st.integers(1, 40)] * 2)
truths = st.lists(st.tuples(boxes, st.booleans()), min_size=1, max_size=6)
finds = st.lists(st.tuples(boxes, st.integers(0, 5)), max_size=12)


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
def small(tmp_path):
    return truth_of(small_voc(tmp_path / "voc"), ["cat", "dog"])


def test_a_class_without_objects_or_with_difficult_ones_only_is_left_out_of_the_mean(tmp_path):
    things = {"x": [("cat", (1, 1, 20, 20), 0), ("dog", (5, 5, 30, 30), 1)]}
    root = write_voc(tmp_path / "voc", {"test": ["x"]}, things)
    truth = truth_of(root, ["cat", "dog", "unicorn"])
    for scorer, result in score(perfect(truth), truth).items():
        assert result["AP"] == pytest.approx(100), scorer  # Detectron2 says 33.3
        assert result["absent_classes"] == ["dog", "unicorn"]
        assert set(result["per_class"]) == {"cat"}


def test_no_detection_at_all_is_zero_and_nothing_to_find_is_an_error(small):
    none = make_detections("x", small.class_names, {i: empty() for i in small.image_ids})
    for result in score(none, small).values():
        assert (result["AP"], result["AP50"]) == (0, 0)
    all_difficult = replace(small, difficult=np.ones(len(small), bool))
    with pytest.raises(KsclError, match="nothing to score"):
        score(none, all_difficult)


def empty():
    return np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, int)


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
    with pytest.raises(KsclError, match="image names differ, 1 only annotated"):
        score(few, small)
    with pytest.raises(KsclError, match="class names"):
        score(perfect(small, ("cat", "horse")), small)
    then = replace(found, ground_truth="0123456789abcdef")
    with pytest.raises(KsclError, match="have changed"):
        score(then, small)
    assert score(then, small, same_annotations=False)[VOC]["AP"] == pytest.approx(100)


def test_a_saved_pass_comes_back_to_the_bit(tmp_path, small):
    found = perfect(small)
    for table, read in ((found, Detections.read), (small, GroundTruth.read)):
        path = write_table(table, tmp_path / "boxes.npz")
        first = path.read_bytes()
        back = read(path)
        for column in fields(table):
            assert np.array_equal(getattr(back, column.name), getattr(table, column.name))
        assert write_table(back, path).read_bytes() == first
    assert GroundTruth.read(tmp_path / "boxes.npz").fingerprint == small.fingerprint


def damaged(path, table, **changes):
    write_table(table, path)
    content = {**np.load(path)} | {key: np.array(value) for key, value in changes.items()}
    np.savez(path, **{key: value for key, value in content.items() if value.ndim or value.item()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "got other"),
        ({"kind": "ground truth"}, "holds ground truth"),
        ({"version": 9}, "got kscl-boxes 9"),
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
    truth = replace(small, dataset="x")
    found = perfect(truth)
    assert len(found) == 3
    found = replace(found, **{k: np.concatenate([v, v[:1]]) for k, v in rows(found)})
    path = tmp_path / "bad.npz"
    damaged(path, found, **changes)
    with pytest.raises(KsclError, match=message) as error:
        Detections.read(path)
    assert str(path) in str(error.value)


def rows(table):
    return [(name, getattr(table, name)) for name in ("image", "category", "boxes", "scores")]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no more", b"\x93NUMPY", b"text"])
def test_a_broken_or_missing_file_is_an_error_and_no_traceback(tmp_path, content):
    path = tmp_path / "broken.npz"
    with pytest.raises(KsclError, match="no such file"):
        Detections.read(path)
    path.write_bytes(content)
    with pytest.raises(KsclError, match="not readable"):
        Detections.read(path)


def test_a_saved_pass_with_one_byte_changed_is_read_or_refused(tmp_path, small):
    path = tmp_path / "found.npz"
    write_table(perfect(small), path)
    content = path.read_bytes()
    for at in range(0, len(content), 5):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        with contextlib.suppress(KsclError):  # never a traceback of zipfile, zlib or numpy
            Detections.read(path)


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


def test_detections_of_another_split_are_refused_by_the_tool(tmp_path, small, capsys):
    found = write_table(perfect(small), tmp_path / "detections.npz")
    words = ["--detections", str(found), "--annotations", f"{tmp_path / 'voc'}:train"]
    assert score_command(words) == 2
    assert "image names differ" in capsys.readouterr().err


def made(seed: int):
    rng = np.random.default_rng(seed)
    things = random_things(rng, IMAGES, len(CLASSES))
    found = random_detections(rng, things, len(CLASSES))
    table = make_detections("x", CLASSES, found)
    scores = (rng.permutation(len(table)) + 1) / 1000  # no ties, whose order copies would change
    return things, replace(table, scores=scores.astype(np.float32))


@pytest.mark.parametrize("scorer", RESAMPLED)
def test_a_resample_scores_as_the_images_that_were_drawn(scorer):
    things, table = made(0)
    truth = make_ground_truth(annotated(things, CLASSES))
    found = resampled_ap(scorer, table, truth)
    assert len(found) == DRAWS  # each has an object
    for draw in range(5):
        counts = draws(IMAGES)[draw]
        copies = [(i, copy) for i, count in enumerate(counts) for copy in range(count)]
        names = list(things)
        drawn = {f"{names[i]}-{copy}": things[names[i]] for i, copy in copies}
        per_image = {}
        for i, copy in copies:
            mine = table.image == i
            columns = (table.boxes[mine], table.scores[mine], table.category[mine])
            per_image[f"{names[i]}-{copy}"] = columns
        of_drawn = make_detections("x", CLASSES, per_image)
        expected = score(of_drawn, make_ground_truth(annotated(drawn, CLASSES)), (scorer,))
        assert found[draw] == pytest.approx(expected[scorer]["AP"], abs=2e-3)


def test_equal_sets_have_equal_resamples_and_each_draws_as_many_images_as_there_are():
    assert (draws(7) == draws(7)).all()
    assert (draws(7).sum(axis=1) == 7).all()
    assert len({tuple(row) for row in draws(7)}) > DRAWS / 2


def test_a_resample_without_any_object_is_left_out():
    things, table = made(1)
    only = {name: found if name == "000003" else [] for name, found in things.items()}
    only["000003"] = [("class0", (1, 1, 50, 50), 0)]
    truth = make_ground_truth(annotated(only, CLASSES))
    assert len(resampled_ap(VOC, table, truth)) == int((draws(IMAGES)[:, 3] > 0).sum())


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
@settings(max_examples=100, deadline=None)
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
