"""Average precision against its definition, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detection.scoring import score
from detection.scoring.boxes import (
    make_detections,
    make_ground_truth,
)
from kscl.data.annotated.annotations import AnnotatedImage, AnnotatedObject, AnnotatedSet
from tests.helpers.data.scored_sets import VOC, VOC10

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
