"""Folders, class folders, lists and tar shards all become numbered images; an index is kept."""

from __future__ import annotations

import os
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest

from kscl.data import open as opening
from kscl.data import tar
from kscl.data.open import open_source
from kscl.data.source import Names, cache_folder
from kscl.errors import KsclError
from tests.kscl.data.conftest import contents, write_tar

pytestmark = pytest.mark.usefixtures("cache")


def fill(folder, *names):
    """Files whose content is their own name."""
    for name in names:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def long_ago(folder):
    """Make a tree look settled: an index of what changed a moment ago is not trusted."""
    for path in [folder, *Path(folder).rglob("*")]:
        os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_folder_tree_gives_its_images_in_the_order_of_their_paths(tmp_path):
    names = ["b.jpg", "a/z.PNG", "a/c/d.webp", "a/b.JPEG", "ümlaut und blank.jpg"]
    fill(tmp_path, *names, "notes.txt", ".hidden.jpg", "a/._b.JPEG", ".git/x.jpg", "jpg", "x.tar")
    source = open_source(str(tmp_path))
    assert [c.decode() for c in contents(source)] == sorted(names)
    assert source.name(0) == str(tmp_path / "a/b.JPEG")
    assert source.labels is None


def test_class_folders_give_labels(tmp_path):
    fill(tmp_path, "dog/1.jpg", "dog/deep/2.jpg", "cat/1.jpg")
    labels = open_source(str(tmp_path)).labels
    assert labels.classes == ["cat", "dog"]
    assert labels.numbers.tolist() == [0, 1, 1]


@pytest.mark.parametrize("where", ["", "nowhere", "nowhere.txt", "nowhere.tar", "some://where"])
def test_what_is_not_there_is_named(where):
    with pytest.raises(KsclError, match=where or "DATA.TRAIN"):
        open_source(where)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("", b"", r"\.jpg.*\.png.*\.webp"),  # a folder without images
        ("one.jpg", b"", r"neither a folder, nor a \.txt list"),
        ("empty.txt", b"# nothing\n\n", "names no image"),
        ("s.tar.gz", b"", r"plain \.tar"),
        ("s.tgz", b"", r"plain \.tar"),
    ],
)
def test_what_holds_no_image_is_named_with_the_reason(tmp_path, name, content, says):
    path = tmp_path / (name or "readme.md")
    path.write_bytes(content)
    with pytest.raises(KsclError, match=says) as caught:
        open_source(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_a_list_names_images_beside_it_or_anywhere(tmp_path):
    fill(tmp_path, "lists/a.jpg", "lists/b c 3.jpg", "far/d.png")
    lines = ["# mine", "", "a.jpg", "b c 3.jpg", str(tmp_path / "far/d.png"), "../far/d.png"]
    (tmp_path / "lists/train.txt").write_text("\n".join(lines))
    source = open_source(str(tmp_path / "lists/train.txt"))
    assert contents(source) == [b"lists/a.jpg", b"lists/b c 3.jpg", b"far/d.png", b"far/d.png"]
    assert source.labels is None


def test_a_list_may_hold_class_numbers(tmp_path):
    fill(tmp_path, "a.jpg", "b c.jpg")
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfa.jpg 10\r\nb c.jpg\t2\n")  # from Windows
    source = open_source(str(tmp_path / "train.txt"))
    assert contents(source) == [b"a.jpg", b"b c.jpg"]
    assert source.labels.classes == ["2", "10"]
    assert source.labels.numbers.tolist() == [1, 0]


def shard_members(start, count):
    members = {}
    for number in range(start, start + count):
        members[f"{number:06d}.jpg"] = f"image {number}".encode()
        members[f"{number:06d}.cls"] = b"%d\n" % (number % 3)
        members[f"{number:06d}.json"] = b"{}"
    return members


def test_a_split_of_a_voc_folder_gives_its_images(tmp_path):
    fill(tmp_path, "JPEGImages/b.jpg", "JPEGImages/a.png", "JPEGImages/other.jpg")
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("b\na\n")
    (lists / "val.txt").write_text("b\nc\nd\n")
    source = open_source(f"voc:{tmp_path}:train")
    assert [source.read(i) for i in range(len(source))] == [
        b"JPEGImages/b.jpg",
        b"JPEGImages/a.png",
    ]
    with pytest.raises(KsclError, match=r"(?s)JPEGImages/c: there is no image.*JPEGImages/d: "):
        open_source(f"voc:{tmp_path}:val")
    with pytest.raises(KsclError, match=r"test\.txt.*No such file"):
        open_source(f"voc:{tmp_path}:test")


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_shards_are_read_in_any_order_with_their_classes(tmp_path, kind):
    write_tar(tmp_path / "s-000.tar", shard_members(0, 4), kind)
    write_tar(tmp_path / "s-001.tar", shard_members(4, 3), kind)
    source = open_source(str(tmp_path / "s-{000..001}.tar"))
    assert [source.read(index) for index in (6, 0, 3, 4)] == [
        b"image 6",
        b"image 0",
        b"image 3",
        b"image 4",
    ]
    assert source.name(4) == str(tmp_path / "s-001.tar/000004.jpg")
    assert source.labels.numbers.tolist() == [n % 3 for n in range(7)]


@pytest.mark.parametrize("where", ["", "s-*.tar", "s-{0,1}.tar", "{s,s}-{0..0}.tar"])
def test_shards_may_be_a_folder_or_a_pattern(tmp_path, where):
    write_tar(tmp_path / "s-0.tar", shard_members(0, 2))
    write_tar(tmp_path / "s-1.tar", shard_members(2, 2))
    assert len(open_source(str(tmp_path / where))) == 4


def test_a_sample_is_what_shares_a_name_up_to_the_first_dot(tmp_path):
    long_name = "deep/" * 30 + "8.seg.png"
    members = {"a.b/1.jpg": b"1", "a.b/1.mask.png": b"mask", "a.b/2.txt": b"", long_name: b"8"}
    members |= {"a.b/._1.jpg": b"shadow"}
    write_tar(tmp_path / "s.tar", members)
    source = open_source(str(tmp_path / "s.tar"))
    assert contents(source) == [b"1", b"8"]
    assert source.labels is None
    write_tar(tmp_path / "none.tar", {"1.txt": b"x"})
    with pytest.raises(KsclError, match="holds no image"):
        open_source(str(tmp_path / "none.tar"))


def test_a_registered_remote_handler_serves_folders_lists_and_shards(elsewhere):
    fill(elsewhere, "set/cat/1.jpg", "set/dog/2.jpg", "set/readme.md")
    (elsewhere / "set/list.txt").write_text("cat/1.jpg\nelsewhere://set/dog/2.jpg\n")
    (elsewhere / "tars").mkdir()
    write_tar(elsewhere / "tars/0.tar", {"1.jpg": b"set/cat/1.jpg", "2.jpg": b"set/dog/2.jpg"})
    expected = [b"set/cat/1.jpg", b"set/dog/2.jpg"]
    folder = open_source("elsewhere://set")
    assert contents(folder) == expected
    assert folder.name(0) == "elsewhere://set/cat/1.jpg"
    assert folder.labels.classes == ["cat", "dog"]
    for where in ("set/list.txt", "tars/0.tar", "tars/{0..0}.tar", "tars"):
        assert contents(open_source(f"elsewhere://{where}")) == expected, where


def test_packed_names_read_like_a_list():
    texts = ["", "a", "bé/ü", "", "c" * 1000]
    names = Names.pack(texts)
    assert list(names) == texts
    assert names[-1] == texts[-1]
    assert len(Names.pack([])) == 0
    with pytest.raises(IndexError):
        names[5]


@pytest.fixture
def scans(monkeypatch):
    """How often a folder was walked or a shard looked through."""
    counted = []
    for module, name in ((opening, "walk_files"), (tar, "scan")):
        original = getattr(module, name)

        def count(path, *rest, original=original):
            counted.append(path)
            return original(path, *rest)

        monkeypatch.setattr(module, name, count)
    return counted


def test_a_second_start_takes_the_index_from_the_cache(tmp_path, scans, cache):
    fill(tmp_path, "a/1.jpg", "b/2.jpg")
    long_ago(tmp_path)
    first, second = (open_source(str(tmp_path)) for _ in range(2))
    assert len(scans) == 1
    assert contents(first) == contents(second) == contents(pickle.loads(pickle.dumps(second)))
    assert second.labels.classes == ["a", "b"]
    assert list(cache.rglob("*.npz"))
    shard = tmp_path / "s.tar"
    for count in (2, 2, 5):
        if count == 5 or not shard.exists():
            write_tar(shard, shard_members(0, count))
            os.utime(shard, (1e9 + count, 1e9 + count))
        assert len(open_source(str(shard))) == count
    assert len(scans) == 3  # the folder once, the shard once and again when it was rewritten


CHANGES = {
    "added": lambda root: fill(root, "b/3.jpg"),
    "removed": lambda root: (root / "b/2.jpg").unlink(),
    "renamed": lambda root: (root / "b/2.jpg").rename(root / "b/0.jpg"),
    "new folder": lambda root: fill(root, "a/deep/4.jpg"),
    "folder removed": lambda root: shutil.rmtree(root / "b"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_indexed_again(tmp_path, change, scans):
    fill(tmp_path, "a/1.jpg", "b/2.jpg")
    long_ago(tmp_path)
    open_source(str(tmp_path))
    CHANGES[change](tmp_path)
    source = open_source(str(tmp_path))
    assert len(scans) == 2
    there = {str(path) for path in tmp_path.rglob("*.jpg")}
    assert {source.name(index) for index in range(len(source))} == there


def test_an_index_made_in_the_moment_of_a_change_is_not_trusted(tmp_path, scans):
    fill(tmp_path, "1.jpg")
    stamp = os.stat(tmp_path).st_mtime_ns
    assert len(open_source(str(tmp_path))) == 1
    fill(tmp_path, "2.jpg")
    os.utime(tmp_path, ns=(stamp, stamp))  # as if the clock had not moved in between
    assert len(open_source(str(tmp_path))) == 2


def test_a_damaged_cache_is_made_anew(tmp_path, cache):
    fill(tmp_path, "1.jpg")
    long_ago(tmp_path)
    open_source(str(tmp_path))
    (file,) = cache.rglob("*.npz")
    for damage in (b"", b"junk", file.read_bytes()[:-100]):
        file.write_bytes(damage)
        assert len(open_source(str(tmp_path))) == 1


def test_the_cache_folder_is_the_one_named_then_the_environments_then_the_users(monkeypatch):
    monkeypatch.setenv("KSCL_CACHE", "/from/environment")
    assert cache_folder("/named") == Path("/named")
    assert cache_folder() == Path("/from/environment")
    monkeypatch.delenv("KSCL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/kscl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/kscl"
