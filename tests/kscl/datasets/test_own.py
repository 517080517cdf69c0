"""A user's own images become a checked, split set, whatever their annotations look like."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from kscl.commands.prepare_data import main
from kscl.data.annotated.voc import read_voc
from kscl.datasets import own
from kscl.datasets.own import (
    LEAST_SIDE,
    LEFT_OVER,
    SAME,
    STORED_SIDE,
    TILES,
    cut,
    deal_groups,
    find_groups,
    parse_split,
    picture_hash,
)
from kscl.errors import KsclError
from tests.helpers.data.own_folders import (
    BOXES,
    SIZE,
    photo_file,
    prepare,
    split_ids,
    write_coco,
    write_folders,
    write_photos,
    write_scenes,
    write_xml,
    write_yolo,
)
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.data.sets import annotation_xml


def bare(name: str) -> str:
    return f"{Path(name).name}.jpg"


WRITERS = {
    "flat XML": write_xml,
    "nested XML": lambda folder, names: write_xml(folder, names, flat=False),
    "YOLO": write_yolo,
    "COCO": write_coco,
    "COCO of bare names": lambda folder, names: write_coco(folder, names, bare),
}


def files_of(*folders: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: (path.lstat().st_mtime_ns, path.read_bytes()) for path in files}


def all_ids(root: Path) -> list[str]:
    return sorted(split_ids(root, "trainval") + split_ids(root, "test"))


def linked(root: Path) -> set[Path]:
    return {path.resolve() for path in (root / "mine/JPEGImages").iterdir()}


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
    before = files_of(tmp_path / "photos", tmp_path / "labels")
    assert prepare(tmp_path) == 0
    made = files_of(tmp_path / "mine")
    assert not (tmp_path / "mine" / TILES).exists()  # photos of large objects stay whole
    assert prepare(tmp_path) == 0
    assert files_of(tmp_path / "photos", tmp_path / "labels") == before
    assert files_of(tmp_path / "mine") == made
    assert prepare(tmp_path, "--split", "50/50") == 2
    assert "split" in capsys.readouterr().err


@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize("inside", ["photos/mine", "labels/mine", "photos"])
def test_a_set_among_the_users_files_is_refused(tmp_path, capsys, inside, annotated):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    where = ["--images", tmp_path / inside.split("/")[0]]
    where += ["--annotations", tmp_path / "labels"] if annotated else []
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


def test_a_split_that_is_not_two_percentages_is_refused():
    assert parse_split("80/20") == (0.8, 0.2)
    for text in ("80", "80/30", "100/0", "a/b", "50/25/25"):
        with pytest.raises(KsclError, match=text):
            parse_split(text)


def test_all_problems_are_reported_at_once_and_nothing_is_written(tmp_path, capsys):
    write_xml(tmp_path / "labels", write_photos(tmp_path / "photos", 9))
    whole = (tmp_path / "photos/p1.jpg").read_bytes()
    (tmp_path / "photos/p1.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "labels/p2.xml").write_text("<annotation>")
    outside = [("cat", (1, 1, 400, 20), 0)]
    (tmp_path / "labels/p3.xml").write_text(annotation_xml(outside, SIZE))
    (tmp_path / "labels/gone.xml").write_text(annotation_xml([], SIZE))
    (tmp_path / "labels/p4.xml").write_text(annotation_xml([("Cat", (1, 1, 9, 9), 0)], SIZE))
    assert prepare(tmp_path) == 2
    errors = capsys.readouterr().err
    for part in ("p1.jpg", "p2.xml", "p3.xml", "gone.xml", "--merge-case", "--skip-bad"):
        assert part in errors
    assert not (tmp_path / "mine").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert prepare(tmp_path, "--merge-case", "--skip-bad") == 0
    assert all_ids(tmp_path) == ["p0", "p4", "p5", "p6", "p7", "p8"]
    assert (tmp_path / "mine/classes.txt").read_text().split() == ["cat", "dog"]


@pytest.mark.parametrize(
    "line", ["0 0.5 0.5", "7 .5 .5 .1 .1", "0 50 50 9 9", "dog .5 .5 .1 .1", "0 .5 .5 .1 .1 .9"]
)
def test_a_bad_line_of_yolo_labels_is_named(tmp_path, capsys, line):
    write_yolo(tmp_path / "labels", write_photos(tmp_path / "photos", 4))
    (tmp_path / "labels/p2.txt").write_text(f"0 .5 .5 .2 .2\n{line}\n")
    (tmp_path / "labels/p3.txt").write_text(f"{line}\n")  # such a file is still taken for labels
    (tmp_path / "labels/p1.txt").write_bytes(b"\xff\xfe0 .5")
    assert prepare(tmp_path) == 2
    errors = capsys.readouterr().err
    assert re.search(r"p2\.txt: line 2", errors)
    assert re.search(r"p3\.txt: line 1", errors)
    assert "p1.txt: is not UTF-8 text" in errors


def test_yolo_labels_without_names_ask_for_them(tmp_path, capsys):
    write_yolo(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    (tmp_path / "labels/classes.txt").write_bytes(b"\xff")
    assert prepare(tmp_path) == 2
    assert "classes.txt is not UTF-8 text" in capsys.readouterr().err
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


def test_labels_that_are_all_damaged_say_how(tmp_path, capsys):
    write_photos(tmp_path / "photos", 1)
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/p0.txt").write_text("dog\n")
    assert prepare(tmp_path) == 2
    assert "p0.txt does not begin with a class number" in capsys.readouterr().err
    assert prepare(tmp_path, "--format", "yolo", "--classes", "dog") == 2
    assert "line 1" in capsys.readouterr().err


def test_annotations_in_several_formats_are_for_the_user_to_choose(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 6)
    write_xml(tmp_path / "labels", names)
    write_coco(tmp_path / "labels", names)
    assert prepare(tmp_path) == 2
    errors = capsys.readouterr().err
    assert "1 of coco" in errors
    assert "6 of voc" in errors
    assert prepare(tmp_path, "--format", "voc") == 0
    assert "Not used: all.json" in capsys.readouterr().out


def test_a_damaged_coco_file_says_why_it_cannot_be_read(tmp_path, capsys):
    write_coco(tmp_path / "labels", write_photos(tmp_path / "photos", 6))
    whole = (tmp_path / "labels/all.json").read_text()
    (tmp_path / "labels/all.json").write_text(whole[:-20])
    assert prepare(tmp_path) == 2
    assert "all.json is not JSON" in capsys.readouterr().err
    (tmp_path / "labels/good.json").write_text(whole)  # a second file does not hide the first
    assert prepare(tmp_path) == 2
    assert re.search(r"all\.json: is not JSON", capsys.readouterr().err)


def save_deep(path: Path) -> None:
    Image.fromarray(np.full(SIZE[::-1], 4000, np.uint16)).save(path, "PNG")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("write_labels", [write_xml, write_coco, write_yolo])
@pytest.mark.parametrize(
    ("spoil", "reason", "fix", "useless"),
    [
        (cut_in_half, "truncated", "download it again", "8-bit"),
        (save_deep, "more than 8 bits", "8-bit RGB", "download"),
    ],
)
def test_a_photo_that_cannot_be_used_gets_the_advice_that_helps(
    tmp_path, capsys, write_labels, spoil, reason, fix, useless
):
    write_labels(tmp_path / "labels", write_photos(tmp_path / "photos", 4))
    victim = tmp_path / "photos/p2.jpg"
    spoil(victim)
    assert prepare(tmp_path) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if str(victim) in line]
    assert reason in line
    assert fix in line
    assert useless not in line


def test_a_bare_name_that_fits_two_photos_or_none_is_named(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 8, nested=True)
    write_coco(tmp_path / "labels", names | {"part0/gone": ["cat"]}, bare)
    (tmp_path / "photos/part0/p1.jpg").write_bytes(photo_file(50))
    assert prepare(tmp_path) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "[" in line]
    ambiguous, missing = sorted(lines)
    assert ambiguous.startswith(f"  [ambiguous image] {tmp_path}/photos/p1.jpg: ")
    for folder in ("part0", "part1"):
        assert f"{tmp_path}/photos/{folder}/p1.jpg" in ambiguous
    assert missing.startswith(f"  [missing image] {tmp_path}/photos/gone.jpg")
    assert prepare(tmp_path, "--skip-bad") == 0
    assert "p1" not in " ".join(all_ids(tmp_path))
    assert len(all_ids(tmp_path)) == 7


def test_paths_may_begin_below_the_folder_of_images(tmp_path):
    names = write_photos(tmp_path / "photos/2024/camera", 6, nested=True)
    other = tmp_path / "photos/2024/other/p0.jpg"  # of the same name, in a folder of another
    other.parent.mkdir()
    other.write_bytes(photo_file(50))
    write_coco(tmp_path / "labels", names, "{}.jpg".format)
    assert prepare(tmp_path) == 0
    assert len(all_ids(tmp_path)) == 6
    assert "2024_other_p0_jpg" not in all_ids(tmp_path)


def test_a_path_that_is_exact_is_taken_before_a_name(tmp_path):
    names = write_photos(tmp_path / "photos", 6)
    (tmp_path / "photos/more").mkdir()
    (tmp_path / "photos/more/p0.jpg").write_bytes(photo_file(50))
    shutil.copy(tmp_path / "photos/p1.jpg", tmp_path / "p1.jpg")  # beside the folder of images
    write_coco(tmp_path / "labels", names, bare)
    assert prepare(tmp_path) == 0
    assert (tmp_path / "mine/JPEGImages/p0_jpg.jpg").resolve() == tmp_path / "photos/p0.jpg"
    assert "p0_jpg" in all_ids(tmp_path)
    assert tmp_path / "p1.jpg" not in linked(tmp_path)


def test_every_folder_of_photos_may_have_a_file_of_its_own(tmp_path):
    for number, folder in enumerate(("train", "valid")):
        names = write_photos(tmp_path / "photos" / folder, 6)
        for name in names:  # the same names, of other photos
            file = tmp_path / "photos" / folder / f"{name}.jpg"
            file.write_bytes(photo_file(100 * number + int(name[1:])))
        write_coco(tmp_path / "photos" / folder, names, bare)
    where = ["--images", tmp_path / "photos", "--annotations", tmp_path / "photos"]
    assert main(["own", *map(str, where), "--output-dir", str(tmp_path / "mine")]) == 0
    assert len(all_ids(tmp_path)) == 12
    assert len(linked(tmp_path)) == 12


def test_an_image_that_is_annotated_twice_is_named(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 6)
    write_coco(tmp_path / "labels", names)
    shutil.copy(tmp_path / "labels/all.json", tmp_path / "labels/again.json")
    assert prepare(tmp_path) == 2
    assert capsys.readouterr().err.count("[duplicate annotation]") == 6


def test_files_of_the_same_name_get_ids_of_their_own(tmp_path):
    write_photos(tmp_path / "photos/a b", 3)
    write_photos(tmp_path / "more", 6)
    os.rename(tmp_path / "more", tmp_path / "photos/c")
    for number in range(3):  # other pictures under the same names
        (tmp_path / f"photos/c/p{number}.jpg").write_bytes(photo_file(50 + number))
    for folder, count in (("a b", 3), ("c", 6)):
        write_xml(tmp_path / "labels" / folder, {f"p{n}": ["cat"] for n in range(count)})
    assert prepare(tmp_path) == 0
    assert len(set(all_ids(tmp_path))) == 9
    assert {"a_b_p0_jpg", "c_p0_jpg", "p5"} <= set(all_ids(tmp_path))


def test_the_report_counts_classes_boxes_and_files_that_are_not_used(tmp_path, capsys):
    names = write_photos(tmp_path / "photos", 6)
    write_xml(tmp_path / "labels", names)
    (tmp_path / "photos/notes.docx").write_bytes(b"x")
    (tmp_path / "labels/p2.txt").write_text("a cat on a mat\n")
    (tmp_path / "labels/captions.json").write_text('{"images": [], "annotations": []}')
    assert prepare(tmp_path) == 0
    report = capsys.readouterr().out
    assert "6 images, 6 annotation files in the format voc." in report
    rows = {line.split()[0]: line.split()[1:] for line in report.splitlines() if line.strip()}
    assert rows["class"] == ["images", "objects", "to", "train", "on", "to", "test", "on"]
    parts = [read_voc(tmp_path / "mine", split) for split in ("trainval", "test")]
    for name in ("cat", "dog"):
        images = sum(name in classes for classes in names.values())
        sides = [part.counts().get(name, 0) for part in parts]
        assert rows[name] == [str(n) for n in (images, sum(sides), *sides)]
    # Four cats of 40 x 40 and four dogs of 60 x 65 pixels, in images of 100 x 75.
    numbers = [int(n) for n in re.findall(r"\d+", " ".join(rows["Boxes:"]))]
    assert numbers == [8, 51, 80, 40, 62, 59, 46, 72]
    assert "Not used: notes.docx, captions.json, p2.txt." in report
    assert (tmp_path / "mine/report.txt").read_text() in report


@pytest.mark.parametrize("rare", [True, False])
def test_classes_of_which_there_are_few_objects_are_named_with_their_number(tmp_path, capsys, rare):
    names = write_photos(tmp_path / "photos", 8)
    many = [("cat", (1 + 9 * i, 1, 9 + 9 * i, 40), 0) for i in range(10)]
    (tmp_path / "labels").mkdir()
    for number, name in enumerate(names):
        dogs = [("dog", (5, 5, 50, 50), 0)] if number < 4 else []
        birds = [("bird", (5, 5, 60, 60), 0)] if number == 5 else []
        things = [*many, *dogs, *birds] if rare else many
        (tmp_path / f"labels/{name}.xml").write_text(annotation_xml(things, SIZE))
    assert prepare(tmp_path) == 0
    report = capsys.readouterr().out
    if not rare:
        assert "Few objects" not in report
        assert "No object" not in report
        return
    for split, purpose in (("trainval", "train"), ("test", "test")):
        counts = read_voc(tmp_path / "mine", split, ("bird", "cat", "dog")).counts()
        assert counts["cat"] >= 10
        listed = [f"{name} ({counts[name]})" for name in ("bird", "dog") if counts[name]]
        assert f"Few objects to {purpose} on: {', '.join(listed)}." in report
        assert (f"No object to {purpose} on: bird." in report) == (not counts["bird"])


def test_tiles_are_two_objects_wide_and_of_no_photo_to_test_on(tmp_path, capsys):
    write_scenes(tmp_path, 8, side=40)
    assert prepare(tmp_path) == 0
    files = sorted((tmp_path / "mine" / TILES).iterdir())
    train = split_ids(tmp_path, "pretrain")
    assert len(files) == 12 * len(train)  # 3 x 4 tiles of 80 pixels each
    assert {path.name.rsplit("-", 1)[0] for path in files} == set(train)
    assert not set(train) & set(split_ids(tmp_path, "test"))
    assert f"Tiles to pretrain on: {len(files)}, " in capsys.readouterr().out
    (row,) = [path for path in files if path.name == f"{train[0]}-6.jpg"]
    whole = cv2.imread(str(tmp_path / f"photos/{train[0]}.jpg")).astype(int)
    assert abs(cv2.imread(str(row)) - whole[80:160, 160:240]).mean() < 6  # but for its JPEG


def test_there_are_never_too_many_tiles(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "MOST_TILES", 20)
    write_scenes(tmp_path, 8, side=40)
    assert prepare(tmp_path) == 0
    train = split_ids(tmp_path, "pretrain")
    found = [path.name.rsplit("-", 1)[0] for path in (tmp_path / "mine" / TILES).iterdir()]
    assert sorted(found) == sorted(name for name in train for _ in range(20 // len(train)))


@pytest.mark.parametrize("size", [(240, 320), (321, 239), (30, 500), (2000, 1000)])
@pytest.mark.parametrize("side", [0.01, 0.3, 0.79])
def test_tiles_cover_the_picture(size, side):
    rows, columns = np.indices(size)
    # A pixel's color tells where it is: red its row, green its column.
    picture = np.stack([rows * 255 / size[0], columns * 255 / size[1], 0 * rows], 2).astype(
        np.uint8
    )
    pixels = min(*size, max(LEAST_SIDE, round(side * min(size))))
    found = list(cut(picture, side))
    assert {tile.shape for tile in found} == {(min(pixels, STORED_SIDE),) * 2 + (3,)}
    for axis, length in enumerate(size):
        spans = {(int(tile[..., axis].min()), int(tile[..., axis].max())) for tile in found}
        seen = np.zeros(256, bool)
        for low, high in spans:
            seen[low : high + 1] = True
        missing = (255 - seen[:255].sum()) * length / 255  # in pixels
        assert missing <= LEFT_OVER * pixels + 0.02 * length


COUNTS = {"red": 8, "blue": 8}


def classes_of(root: Path) -> dict[str, int]:
    folders = (root / "mine/classes/train").iterdir()
    return {folder.name: len(list(folder.iterdir())) for folder in folders}


def test_class_folders_are_split_for_a_probe_and_not_touched(tmp_path, capsys):
    command = write_folders(tmp_path, COUNTS)
    before = files_of(tmp_path / "photos")
    assert main(command) == 0
    for side, count in (("train", 6), ("val", 2)):
        for name in COUNTS:
            assert len(list((tmp_path / "mine/classes" / side / name).iterdir())) == count
    made = files_of(tmp_path / "mine")
    assert main(command) == 0
    assert "already exists" in capsys.readouterr().out
    assert (files_of(tmp_path / "photos"), files_of(tmp_path / "mine")) == (before, made)
    (tmp_path / "photos/loose.jpg").write_bytes(photo_file(99))
    assert main(command) == 2
    assert "--annotations" in capsys.readouterr().err


def test_class_folders_whose_names_differ_by_case_are_for_the_user_to_decide(tmp_path, capsys):
    command = write_folders(tmp_path, {"cat": 8, "Cat": 4, "dog": 8})
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert re.search(r"'cat' \(8 images, first in .*\) and 'Cat' \(4 images, first in .*\)", errors)
    assert "--merge-case" in errors
    assert "--skip-bad" not in errors
    assert main([*command, "--merge-case"]) == 0
    assert classes_of(tmp_path) == {"cat": 9, "dog": 6}
    shutil.rmtree(tmp_path / "mine")
    assert main([*command, "--keep-case"]) == 0
    assert classes_of(tmp_path) == {"cat": 6, "Cat": 3, "dog": 6}


def test_a_class_of_one_picture_saved_many_times_is_too_few_to_split(tmp_path, capsys):
    command = write_folders(tmp_path, {**COUNTS, "one": 1, "same": 1})
    for quality in (30, 50, 70):  # of the picture that is there
        (tmp_path / f"photos/same/{quality}.jpg").write_bytes(photo_file(17, quality))
    assert main(command) == 2
    assert "one, same." in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_an_image_that_cannot_be_read_is_refused_or_left_out(tmp_path, capsys):
    command = write_folders(tmp_path, {"red": 9, "blue": 8})
    (tmp_path / "photos/red/8.jpg").write_bytes(b"no image")
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert "1 problem found; nothing was written" in errors
    assert "download it again" in errors
    assert "--skip-bad" in errors
    assert main([*command, "--skip-bad"]) == 0
    assert "red/8.jpg" in capsys.readouterr().out
    assert classes_of(tmp_path) == {"red": 6, "blue": 6}
