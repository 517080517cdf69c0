"""Masks in the scorer: read, packed, saved and scored, against masks as numpy has them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from detection.commands.score import main
from detection.scoring import MASK_SCORER, metrics_of, score, scorers_for
from detection.scoring.boxes import (
    Detections,
    GroundTruth,
    make_detections,
    make_ground_truth,
    packed,
    packed_pixels,
    write_table,
)
from kscl.data.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet
from kscl.data.masks import extent, read_mask, run_lengths
from kscl.datasets.shapes import polygons_of
from kscl.errors import KsclError
from tests.helpers.data.mask_pixels import mask_iou

SIDES = (24, 32)  # height, width


def blob(rng):
    """Return a disc or a block of pixels, perhaps with some of them missing."""
    y, x = np.ogrid[: SIDES[0], : SIDES[1]]
    center_y, center_x = rng.uniform(4, 20), rng.uniform(4, 28)
    pixels = (y - center_y) ** 2 + (x - center_x) ** 2 < rng.uniform(2, 9) ** 2
    return pixels & (rng.random(SIDES) < rng.choice([1.0, 0.9]))


def as_coco(pixels, form):
    """Return a mask as a COCO file has it."""
    if form == "polygons":
        return [[float(value) for value in part] for part in polygons_of(pixels)]
    counts = run_lengths(pixels).counts.tolist()
    if form == "packed":
        counts = packed_pixels(pixels)["counts"].decode()
    return {"size": list(SIDES), "counts": counts}


@pytest.mark.parametrize("form", ["polygons", "runs", "packed"])
def test_overlaps_are_those_of_the_pixels_for_objects_and_crowds(form):
    rng = np.random.default_rng(0)
    for _ in range(100):
        wanted, found = blob(rng), blob(rng)
        if not wanted.any():
            continue
        mask = packed(read_mask(as_coco(wanted, form)), *SIDES)
        for crowd in (False, True):
            theirs = coco_masks.iou([packed_pixels(found)], [mask], [int(crowd)])
            assert theirs[0][0] == pytest.approx(mask_iou(found, wanted, crowd), abs=1e-12)


def random_case(rng, images=6):
    """Return truth and detections with masks: [(pixels, crowd)] and [(pixels, score)] per image."""
    case = {}
    for number in range(images):
        wanted = [(blob(rng), bool(rng.random() < 0.25)) for _ in range(rng.integers(0, 5))]
        wanted = [item for item in wanted if item[0].sum() > 3]
        found = [(blob(rng), float(rng.random())) for _ in range(rng.integers(0, 4))]
        for pixels, _ in wanted:
            moved = np.roll(pixels, rng.integers(0, 3), axis=1)
            found.append((moved, float(rng.random())))
        case[f"{number}"] = (wanted, found)
    case["0"][0].append((np.pad(np.ones((9, 9), bool), ((3, 12), (3, 20))), False))
    return case


def tables(case, form):
    images, per_image, masks = [], {}, {}
    for key, (wanted, found) in case.items():
        objects = []
        for pixels, crowd in wanted:
            mask = read_mask(as_coco(pixels, form))
            area = float(np.count_nonzero(pixels))
            objects.append(AnnotatedObject("x", extent(mask), crowd, area=area, mask=mask))
        images.append(AnnotatedImage(key, None, SIDES[1], SIDES[0], tuple(objects), "made here"))
        boxes = np.array([extent(run_lengths(p)) or (0, 0, 0, 0) for p, _ in found], np.float32)
        scores = np.array([value for _, value in found], np.float32)
        per_image[key] = (boxes.reshape(-1, 4), scores, np.zeros(len(found), int))
        masks[key] = [packed_pixels(pixels) for pixels, _ in found]
    truth = make_ground_truth(AnnotatedSet("made", ("x",), images))
    return make_detections("made", ("x",), per_image, truth.fingerprint, masks), truth


def plain_ap(case, threshold) -> tuple[float, float]:
    """Return COCO's AP and recall of one class at one threshold, one detection at a time."""
    marks, objects = [], sum(not crowd for wanted, _ in case.values() for _, crowd in wanted)
    for wanted, found in case.values():
        ranked = sorted(found, key=lambda item: -np.float32(item[1]))
        taken = set()
        for pixels, value in ranked:
            overlaps = [mask_iou(pixels, other, crowd) for other, crowd in wanted]
            best = None
            for index, (_, crowd) in sorted(enumerate(wanted), key=lambda item: item[1][1]):
                if best is not None and not wanted[best][1] and crowd:
                    break  # an object comes before any crowd
                if index in taken and not crowd:
                    continue
                least = min(threshold, 1 - 1e-10) if best is None else overlaps[best]
                if overlaps[index] >= least:
                    best = index
            if best is None:
                marks.append((np.float32(value), 0))
            elif not wanted[best][1]:
                taken.add(best)
                marks.append((np.float32(value), 1))
    marks.sort(key=lambda item: -item[0])
    hits = np.cumsum([hit for _, hit in marks])
    precision = hits / np.arange(1, len(marks) + 1)
    recall = hits / objects
    levels = np.linspace(0, 1, 101)
    best_from = [max(precision[recall >= level], default=0.0) for level in levels]
    return 100 * float(np.mean(best_from)), 100 * float(recall[-1])


@pytest.mark.parametrize("form", ["polygons", "runs", "packed"])
def test_mask_ap_and_recall_equal_the_definition_written_out(form):
    for seed in range(12):
        case = random_case(np.random.default_rng(seed))
        result = score(*tables(case, form), (MASK_SCORER,))[MASK_SCORER]
        expected = [plain_ap(case, percent / 100) for percent in range(50, 100, 5)]
        assert result["AP50"] == pytest.approx(expected[0][0], abs=1e-9)
        assert result["AP75"] == pytest.approx(expected[5][0], abs=1e-9)
        assert result["AP"] == pytest.approx(np.mean([ap for ap, _ in expected]), abs=1e-9)
        assert result["AR100"] == pytest.approx(np.mean([r for _, r in expected]), abs=1e-9)
        assert result["per_class"]["x"]["AR100"] == result["AR100"]


def test_thousands_of_masks_are_scored_by_their_own_sizes():
    """COCO sorts masks into small (below 32 x 32), medium and large by the sum of their pixels."""
    images, per_image, masks = [], {}, {}
    sides = (10, 50, 100)
    for number in range(1000):
        objects, found = [], []
        for side in sides:
            pixels = np.zeros((128, 128), bool)
            pixels[:side, 20 : 20 + side] = True
            found.append(pixels)
            mask, box = run_lengths(pixels), (20.0, 0.0, 20.0 + side, float(side))
            objects.append(AnnotatedObject("x", box, area=float(side**2), mask=mask))
        images.append(AnnotatedImage(str(number), None, 128, 128, tuple(objects), "made here"))
        boxes = np.array([thing.box for thing in objects], np.float32)
        per_image[str(number)] = (boxes, np.ones(3, np.float32), np.zeros(3, int))
        masks[str(number)] = [packed_pixels(pixels) for pixels in found]
    truth = make_ground_truth(AnnotatedSet("made", ("x",), images))
    detections = make_detections("made", ("x",), per_image, truth.fingerprint, masks)
    assert len(detections.masks) == 3000
    result = score(detections, truth, (MASK_SCORER,))[MASK_SCORER]
    for name in ("AP", "APs", "APm", "APl"):
        assert result[name] == pytest.approx(100.0), name
    # Only the small ones are found: the others must not count as small false positives.
    small = dict(per_image)
    for key, (boxes, scores, classes) in per_image.items():
        small[key] = (boxes[:1], scores[:1], classes[:1])
    first = {key: of_image[:1] for key, of_image in masks.items()}
    fewer = make_detections("made", ("x",), small, truth.fingerprint, first)
    result = score(fewer, truth, (MASK_SCORER,))[MASK_SCORER]
    assert (result["APs"], result["APm"], result["APl"]) == pytest.approx((100.0, 0.0, 0.0))


@pytest.fixture
def pair():
    return tables(random_case(np.random.default_rng(0)), "polygons")


def test_masks_are_scored_beside_boxes_and_named_in_the_metrics(pair):
    result = score(*pair)
    assert tuple(result) == scorers_for(masks=True)
    assert "coco-101pt-segm" not in scorers_for(masks=False)
    metrics = metrics_of(result, "coco-101pt")
    assert metrics["mask/AP"] == result[MASK_SCORER]["AP"]
    assert metrics["AR10"] == result["coco-101pt"]["AR10"]
    assert {"mask/AP50", "mask/AR100", "AP", "voc10-every-point/AP50"} <= set(metrics)


def test_a_saved_pass_with_masks_comes_back_and_scores_the_same(pair, tmp_path, capsys):
    detections, truth = pair
    write_table(detections, tmp_path / "detections.npz")
    write_table(truth, tmp_path / "ground_truth.npz")
    again = Detections.read(tmp_path / "detections.npz")
    assert [m["counts"] for m in again.masks] == [m["counts"] for m in detections.masks]
    assert GroundTruth.read(tmp_path / "ground_truth.npz").fingerprint == truth.fingerprint
    words = ["--detections", str(tmp_path / "detections.npz"), "--annotations"]
    assert main([*words, str(tmp_path / "ground_truth.npz"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told[MASK_SCORER]["AP"] == score(*pair)[MASK_SCORER]["AP"]
    assert main([*words, str(tmp_path / "ground_truth.npz")]) == 0
    assert "AR by detections per image" in capsys.readouterr().out


def test_the_same_masks_written_in_another_form_are_the_same_truth():
    case = random_case(np.random.default_rng(3))
    prints = {tables(case, form)[1].fingerprint for form in ("polygons", "runs", "packed")}
    assert len(prints) == 1
    case["0"][0][-1][0][4, 4] = False
    assert tables(case, "runs")[1].fingerprint not in prints


def test_masks_that_are_missing_damaged_or_of_another_size_are_refused(pair, tmp_path):
    detections, truth = pair
    boxes_only = AnnotatedSet(
        "made", ("x",), [AnnotatedImage(i, None, 32, 24, (), "here") for i in truth.image_ids]
    )
    with pytest.raises(KsclError, match="no masks"):
        score(detections, make_ground_truth(boxes_only), (MASK_SCORER,), same_annotations=False)
    path = write_table(detections, tmp_path / "detections.npz")
    content = dict(np.load(path))
    for name, value in (
        ("mask_bytes", content["mask_bytes"][:-1]),
        ("mask_bytes", np.full_like(content["mask_bytes"], 200)),
        ("mask_ends", content["mask_ends"][::-1].copy()),
        ("mask_sizes", content["mask_sizes"] + 1),
        ("mask_sizes", content["mask_sizes"].astype(float)),
    ):
        np.savez(path, **(content | {name: value}))
        with pytest.raises(KsclError, match="damaged"):
            Detections.read(path)
    turned = [{"size": m["size"][::-1], "counts": m["counts"]} for m in detections.masks]
    object.__setattr__(detections, "masks", tuple(turned))
    with pytest.raises(KsclError, match="height, width"):
        score(detections, truth)
