"""Annotated sets broken in every way that is easy to think of: problems in lines, no traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from kscl.data.annotated.coco import read_category_names, read_coco
from kscl.data.annotated.voc import read_voc
from kscl.data.annotations import parse_source, read_source, shared_class_names
from kscl.data.open import open_source
from kscl.errors import KsclError
from tests.helpers.data.sets import annotation_xml, small_coco, small_voc
from tests.helpers.json_values import paths_in, replaced
from tests.kscl.data.conftest import ODD_FILES

pytestmark = pytest.mark.usefixtures("no_test_hangs")

# In place of each value of a COCO file.
WRONG = [
    *(None, True, -1, 1e308, float("nan"), 10**400, "", "x", "\0", "\ud800", "n" * 5000),
    *([], [[1]], {}, [None] * 4, [1e308] * 4, "/etc/passwd", "../x"),
]
# In place of each tag's text of a VOC file.
TEXTS = [
    *("", "x", "nan", "inf", "1e400", "-1", "9" * 5000, "&#0;", "<b/>", "no", "[1]", "a" * 99999),
    *("\x1b[31m", "\u202eevil", "\n\n"),
]
FILES = ("Annotations/c.xml", "JPEGImages/c.jpg", "ImageSets/Main/test.txt", "classes.txt")
FOLDERS = ("Annotations", "JPEGImages", "ImageSets/Main")


def only_our_errors(look, *given, **options):
    """Whether a set is usable; any other error than ours fails the test."""
    try:
        found = look(*given, **options)
    except KsclError:
        return False
    problems = getattr(found, "problems", [])
    for problem in problems:
        assert "\n" not in str(problem)
        str(problem).encode()  # can be printed
    return not any(problem.fatal for problem in problems)


def test_any_value_of_a_coco_file_may_be_wrong(tmp_path):
    json_file, images = small_coco(tmp_path)
    good = json.loads(json_file.read_text())
    good["annotations"][0]["segmentation"] = [[1, 1, 5, 1, 5, 5]]
    good["annotations"] = good["annotations"][:1]
    usable = 0
    for path in paths_in(good):
        for value in WRONG:
            json_file.write_text(json.dumps(replaced(good, path, value)))
            usable += only_our_errors(read_coco, json_file, images)
            if path[0] == "categories":
                only_our_errors(read_category_names, json_file)
    assert usable < 100  # a negative coordinate may stand; nearly all else is refused


RAW = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "utf-16": '{"images": []}'.encode("utf-16"),
    "nested lists": b"[" * 200_000,
    "nested dicts": b'{"a":' * 100_000,
    "not text": b"\xff\xfe\xfd",
    "a long number": b"1" * 10_000,
    "cut off": b'{"images": [',
    "a text": b'"images"',
}


def test_a_coco_file_may_hold_anything(tmp_path):
    json_file, images = small_coco(tmp_path)
    for kind, content in RAW.items():
        json_file.write_bytes(content)
        assert not only_our_errors(read_coco, json_file, images), kind
        assert not only_our_errors(read_category_names, json_file), kind


@pytest.mark.parametrize(
    "name", ["a\0b", "n" * 5000, "n" * 300, "~nobody knows/x", "nowhere", "\ud800"]
)
def test_a_path_may_be_anything(tmp_path, name):
    json_file, images = small_coco(tmp_path / "coco")
    root = small_voc(tmp_path / "voc")
    for given in ((name, images), (json_file, name)):
        assert not only_our_errors(read_coco, *given)
    assert not only_our_errors(read_category_names, name)
    assert not only_our_errors(read_voc, name, "train")
    assert not only_our_errors(read_voc, root, name)
    formats = ("voc", "coco", "yolo")
    specs = [f"{kind}:{spec}" for kind in formats for spec in (f"{name}:x", f"{root}:{name}")]
    for spec in (*specs, f"coco:x:{name}", f"yolo:{name}:{images}", name):
        assert not only_our_errors(lambda spec=spec: read_source(parse_source(spec)))
        assert not only_our_errors(lambda spec=spec: shared_class_names([parse_source(spec)]))


@pytest.mark.parametrize("tag", ["width", "name", "difficult", "pose", "xmin"])
def test_any_tag_of_a_voc_file_may_be_wrong(tmp_path, tag):
    root = small_voc(tmp_path)
    good = annotation_xml([("cat", (1, 1, 20, 20), 0)])
    pattern = f"<{tag}>.*?</{tag}>"
    for text in TEXTS:
        wrong = re.sub(pattern, lambda _, text=text: f"<{tag}>{text}</{tag}>", good)
        (root / "Annotations/c.xml").write_text(wrong)
        only_our_errors(read_voc, root, "test")
        only_our_errors(read_voc, root, "test", ["cat", "dog"])
    for wrong in (re.sub(pattern, "", good), re.sub(pattern, lambda found: found[0] * 2, good)):
        (root / "Annotations/c.xml").write_text(wrong)
        only_our_errors(read_voc, root, "test", ["cat", "dog"])


XML = {
    "empty": b"",
    "zero": b"\0",
    "nested": b"<a>" * 100_000,
    "nested objects": b"<annotation>" + b"<object>" * 50_000,
    "cut off": b"<annotation><object>",
    "utf-32": annotation_xml([]).encode("utf-32"),
    "not text": b"\xff" * 100,
    **{
        f"encoding {name}": f'<?xml version="1.0" encoding="{name}"?><annotation/>'.encode()
        for name in ("foo", "utf-7", "idna", "base64", "undefined", "rot13")
    },
}


def test_an_annotation_may_hold_anything(tmp_path):
    root = small_voc(tmp_path)
    for content in XML.values():
        (root / "Annotations/c.xml").write_bytes(content)
        only_our_errors(read_voc, root, "test")
        only_our_errors(read_voc, root, "test", ["cat", "dog"])


MAKE = ODD_FILES | {
    "folder": os.mkdir,
    "link up": lambda path: path.symlink_to(".."),
    "empty": Path.touch,
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("kind", MAKE)
def test_any_part_of_a_voc_folder_may_be_something_else(tmp_path, kind):
    for entry in (*FILES, *FOLDERS):
        root = small_voc(tmp_path / entry / "voc")
        path = root / entry
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        MAKE[kind](path)
        for with_images in (True, False):
            only_our_errors(read_voc, root, "test", with_images=with_images)
            only_our_errors(read_voc, root, "test", ["cat", "dog"], with_images=with_images)
        only_our_errors(open_source, f"voc:{root}:test", str(tmp_path / "cache"))


def test_a_split_may_list_anything(tmp_path):
    root, lists = small_voc(tmp_path / "voc"), ("\0\n", "a" * 5000, "/etc/passwd", "..", ".", "c/.")
    for ids in (*map(str.encode, lists), b"\xff", b"\xe2\x80\xa8", b"c -1"):
        (root / "ImageSets/Main/test.txt").write_bytes(ids)
        assert not only_our_errors(read_voc, root, "test"), ids
        assert not only_our_errors(open_source, f"voc:{root}:test", str(tmp_path / "cache")), ids
