"""A user's own images become a checked, split set, whatever their annotations look like."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from kscl.commands.prepare_data import main
from kscl.data.annotated.voc import read_voc
from kscl.datasets.own.near_duplicates import SAME, find_groups, picture_hash
from kscl.datasets.own.split import deal_groups, parse_split
from kscl.errors import KsclError
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.data.sets import annotation_xml

SIZE = (100, 75)  # width, height
BOXES = {"cat": (10, 20, 50, 60), "dog": (30, 5, 90, 70)}  # from 0, the last pixel excluded


def write_photos(folder: Path, count: int, nested: bool = False) -> dict[str, list[str]]:
    """Different photos by name, every third with a dog only, the others with a cat or both."""
    names = {}
    for number in range(count):
        name = f"part{number % 2}/p{number}" if nested else f"p{number}"
        path = folder / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(photo(number, *SIZE[::-1])))
        names[name] = [["dog"], ["cat"], ["cat", "dog"]][number % 3]
    return names


def write_xml(folder: Path, names: dict[str, list[str]], flat: bool = True) -> None:
    for name, classes in names.items():
        path = folder / f"{Path(name).name if flat else name}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        boxes = [(c, (BOXES[c][0] + 1, BOXES[c][1] + 1, *BOXES[c][2:]), 0) for c in classes]
        path.write_text(annotation_xml(boxes, SIZE))


def write_yolo(folder: Path, names: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True)
    (folder / "classes.txt").write_text("dog\ncat\n")
    for name, classes in names.items():
        lines = []
        for c in classes:
            x1, y1, x2, y2 = (v / SIZE[i % 2] for i, v in enumerate(BOXES[c]))
            label = ["dog", "cat"].index(c)
            lines.append(
                f"{label} {(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}"
            )
        (folder / f"{Path(name).name}.txt").write_text("\n".join(lines))


def write_coco(
    folder: Path,
    names: dict[str, list[str]],
    file_name: Callable[[str], str] = "photos/{}.jpg".format,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = [
        {"id": i, "file_name": file_name(name), "width": SIZE[0], "height": SIZE[1]}
        for i, name in enumerate(names)
    ]
    objects = [(i, c) for i, classes in enumerate(names.values()) for c in classes]
    annotations = [
        {
            "id": number,
            "image_id": i,
            "category_id": 5 if c == "dog" else 9,
            "bbox": [*BOXES[c][:2], BOXES[c][2] - BOXES[c][0], BOXES[c][3] - BOXES[c][1]],
        }
        for number, (i, c) in enumerate(objects)
    ]
    categories = [{"id": 5, "name": "dog"}, {"id": 9, "name": "cat"}]
    content = {"images": images, "categories": categories, "annotations": annotations}
    (folder / "all.json").write_text(json.dumps(content))


def bare(name: str) -> str:
    return f"{Path(name).name}.jpg"


WRITERS = {
    "flat XML": write_xml,
    "nested XML": lambda folder, names: write_xml(folder, names, flat=False),
    "YOLO": write_yolo,
    "COCO": write_coco,
    "COCO of bare names": lambda folder, names: write_coco(folder, names, bare),
}


def prepare(root: Path, *more: str) -> int:
    where = ("--images", root / "photos", "--annotations", root / "labels")
    return main(["own", *map(str, where), "--output-dir", str(root / "mine"), *more])


def split_ids(root: Path, split: str) -> list[str]:
    return (root / "mine/ImageSets/Main" / f"{split}.txt").read_text().split()


@pytest.mark.parametrize("layout", WRITERS)
def test_every_format_gives_the_same_boxes_and_splits(tmp_path, layout, capsys):
    names = write_photos(tmp_path / "photos", 12, nested=True)
    WRITERS[layout](tmp_path / "labels", names)
    assert prepare(tmp_path) == 0
    assert "Not used" not in capsys.readouterr().out
    found = {split: read_voc(tmp_path / "mine", split).checked() for split in ("trainval", "test")}
    assert sum(len(part.images) for part in found.values()) == 12
    ids = {name: {image.id for image in part.images} for name, part in found.items()}
    assert ids["test"] == {"p1", "p4", "p6", "p9"}  # the split does not depend on the format
    for part in found.values():
        assert part.class_names == ("cat", "dog")
        for image in part.images:
            wanted = names[f"part{int(image.id[1:]) % 2}/{image.id}"]
            assert [thing.name for thing in image.objects] == wanted
            for thing in image.objects:
                assert thing.box == pytest.approx(BOXES[thing.name], abs=0.01)
            assert image.path
            assert image.path.is_symlink()


def test_the_users_files_are_not_touched_and_a_second_start_changes_nothing(tmp_path, capsys):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    files = [p for folder in ("photos", "labels") for p in (tmp_path / folder).rglob("*")]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    assert prepare(tmp_path) == 0
    made = os.stat(tmp_path / "mine/own.json").st_mtime_ns
    assert prepare(tmp_path) == 0
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before
    assert os.stat(tmp_path / "mine/own.json").st_mtime_ns == made
    assert prepare(tmp_path, "--split", "50/50") == 2
    assert "split" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["photos/mine", "labels/mine", "photos"])
def test_a_set_among_the_users_files_is_refused(tmp_path, capsys, inside):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    where = ["--images", tmp_path / "photos", "--annotations", tmp_path / "labels"]
    assert main(["own", *map(str, where), "--output-dir", str(tmp_path / inside)]) == 2
    assert "Choose a folder beside it" in capsys.readouterr().err


def test_near_duplicates_are_never_on_both_sides(tmp_path):
    names = write_photos(tmp_path / "photos", 8)
    for number in range(4):  # saved again, smaller, lighter; and one with the same bytes
        picture = photo(number, *SIZE[::-1])
        same = {
            "small": cv2.resize(picture, SIZE, interpolation=cv2.INTER_AREA),
            "light": np.clip(picture * 1.1 + 8, 0, 255).astype(np.uint8),
        }
        for kind, changed in same.items():
            (tmp_path / "photos" / f"p{number}_{kind}.jpg").write_bytes(jpeg(changed, 40))
            names[f"p{number}_{kind}"] = names[f"p{number}"]
    write_xml(tmp_path / "labels", names)
    extra = tmp_path / "photos/unlabeled.jpg"
    extra.write_bytes((tmp_path / "photos/p0.jpg").read_bytes())
    assert prepare(tmp_path, "--split", "50/50") == 0
    sides = {i: split for split in ("trainval", "test") for i in split_ids(tmp_path, split)}
    assert set(sides.values()) == {"trainval", "test"}
    for number in range(4):
        assert len({sides[f"p{number}{kind}"] for kind in ("", "_small", "_light")}) == 1
    unlabeled_is_used = "unlabeled" in split_ids(tmp_path, "pretrain")
    assert unlabeled_is_used == (sides["p0"] == "trainval")
    assert not set(split_ids(tmp_path, "pretrain")) & set(split_ids(tmp_path, "test"))


def test_different_photos_are_not_near_duplicates(tmp_path):
    hashes = np.stack([picture_hash(photo(seed)) for seed in range(40)])
    differing = (hashes[:, None] != hashes[None]).mean(2)[np.triu_indices(40, 1)]
    assert differing.min() > SAME
    write_photos(tmp_path, 5)
    assert len(find_groups(sorted(tmp_path.iterdir()))) == 5


def test_every_class_is_on_both_sides_in_proportion():
    rng = np.random.default_rng(0)
    chances = [0.5, 0.3, 0.1, 0.05, 0.03, 0.02]
    images = [list(map(str, rng.choice(6, rng.integers(1, 4), p=chances))) for _ in range(200)]
    images += [["rare"], ["rare"], []]
    sides = deal_groups([[image] for image in images], (0.75, 0.25), seed=1)
    train, test = (
        Counter(c for i, s in zip(images, sides, strict=True) if s == side for c in set(i))
        for side in (0, 1)
    )
    assert train["rare"] == test["rare"] == 1
    for name in "0123":
        assert test[name] == pytest.approx(0.25 * (train[name] + test[name]), abs=2)
    assert sum(sides) == pytest.approx(51, abs=3)


def test_all_problems_are_told_at_once_and_nothing_is_written(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 9)
    write_xml(tmp_path / "labels", names)
    whole = (tmp_path / "photos/p1.jpg").read_bytes()
    (tmp_path / "photos/p1.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "labels/p2.xml").write_text("<annotation>")
    outside = [("cat", (1, 1, 400, 20), 0)]
    (tmp_path / "labels/p3.xml").write_text(annotation_xml(outside, SIZE))
    (tmp_path / "labels/gone.xml").write_text(annotation_xml([], SIZE))
    (tmp_path / "labels/p4.xml").write_text(annotation_xml([("Cat", (1, 1, 9, 9), 0)], SIZE))
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    for part in ("p1.jpg", "p2.xml", "p3.xml", "gone.xml", "--merge-case", "--skip-bad"):
        assert part in told
    assert not (tmp_path / "mine").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert prepare(tmp_path, "--merge-case", "--skip-bad") == 0
    ids = split_ids(tmp_path, "trainval") + split_ids(tmp_path, "test")
    assert sorted(ids) == ["p0", "p4", "p5", "p6", "p7", "p8"]
    assert (tmp_path / "mine/classes.txt").read_text().split() == ["cat", "dog"]


def test_names_that_differ_by_case_alone_do_not_advise_to_skip_images(tmp_path, capsys):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 4))
    (tmp_path / "labels/p2.xml").write_text(annotation_xml([("Cat", (1, 1, 9, 9), 0)], SIZE))
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    assert "--merge-case" in told
    assert "--skip-bad" not in told
    labels = tmp_path / "labels"
    assert f"'Cat' (1 object, first in {labels / 'p2.xml'})" in told
    assert f"'cat' (1 object, first in {labels}/" in told


@pytest.mark.parametrize(
    "line", ["0 0.5 0.5", "7 .5 .5 .1 .1", "0 50 50 9 9", "dog .5 .5 .1 .1", "0 .5 .5 .1 .1 .9"]
)
def test_a_bad_line_of_yolo_labels_is_named(tmp_path, capsys, line):
    write_yolo(tmp_path / "labels", write_photos(tmp_path / "photos", 4))
    (tmp_path / "labels/p2.txt").write_text(f"0 .5 .5 .2 .2\n{line}\n")
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    assert "p2.txt" in told
    assert "line 2" in told


def test_yolo_labels_without_names_ask_for_them(tmp_path, capsys):
    write_yolo(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    (tmp_path / "labels/classes.txt").unlink()
    assert prepare(tmp_path) == 2
    assert "--classes" in capsys.readouterr().err
    assert prepare(tmp_path, "--classes", "hund", "katze") == 0
    assert (tmp_path / "mine/classes.txt").read_text().split() == ["hund", "katze"]


def test_yolo_polygons_become_their_boxes_and_a_yaml_names_the_classes(tmp_path):
    write_photos(tmp_path / "photos", 2)
    (tmp_path / "labels").mkdir()
    (tmp_path / "data.yaml").write_text("names: {0: dog}\n")
    for number in range(2):
        (tmp_path / f"labels/p{number}.txt").write_text("0 0.1 0.2 0.5 0.2 0.5 0.8\n")
    assert prepare(tmp_path, "--split", "50/50") == 0
    (image,) = read_voc(tmp_path / "mine", "test").checked().images
    assert image.objects[0].box == pytest.approx((10, 15, 50, 60), abs=0.01)


def test_files_of_the_same_name_get_ids_of_their_own(tmp_path):
    write_photos(tmp_path / "photos/a b", 3)
    write_photos(tmp_path / "more", 6)
    os.rename(tmp_path / "more", tmp_path / "photos/c")
    for number in range(3):  # other pictures under the same names
        (tmp_path / f"photos/c/p{number}.jpg").write_bytes(jpeg(photo(50 + number, *SIZE[::-1])))
    for folder, count in (("a b", 3), ("c", 6)):
        write_xml(tmp_path / "labels" / folder, {f"p{n}": ["cat"] for n in range(count)})
    assert prepare(tmp_path) == 0
    ids = split_ids(tmp_path, "trainval") + split_ids(tmp_path, "test")
    assert len(set(ids)) == 9
    assert {"a_b_p0_jpg", "c_p0_jpg", "p5"} <= set(ids)


def test_a_split_that_is_not_two_percentages_is_refused():
    assert parse_split("80/20") == (0.8, 0.2)
    for text in ("80", "80/30", "100/0", "a/b", "50/25/25"):
        with pytest.raises(KsclError, match=text):
            parse_split(text)
