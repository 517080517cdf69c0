"""A tar file with damage in the middle gives what is good in it and says what is not."""

from __future__ import annotations

import contextlib
import io
import tarfile

import pytest

from kscl.data.tar.members import BLOCK, Member, read_members
from kscl.errors import KsclError

COUNT = 20


def write_tar(path, kind=tarfile.PAX_FORMAT, prefix=""):
    """A tar file of COUNT members, and where the header of each starts."""
    with tarfile.open(path, "w", format=kind) as tar:
        for number in range(COUNT):
            info = tarfile.TarInfo(f"{prefix}{number:04d}.jpg")
            info.size = 1500 + number
            tar.addfile(info, io.BytesIO(bytes([number + 1]) * info.size))
    with tarfile.open(path) as tar:
        return [member.offset for member in tar]


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def numbers(members):
    return [int(member.name.rpartition("/")[2].removesuffix(".jpg")) for member in members]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("damage", [b"\0" * BLOCK, b"\xff" * BLOCK, b"x", b"\0" * 4 * BLOCK])
def test_one_damaged_header_costs_one_member_and_is_noted(tmp_path, kind, damage):
    offsets = write_tar(tmp_path / "s.tar", kind)
    overwrite(tmp_path / "s.tar", offsets[9], damage)
    gaps = []
    members = list(read_members(str(tmp_path / "s.tar"), gaps))
    assert numbers(members) == [n for n in range(COUNT) if n != 9]
    (gap,) = gaps
    assert (gap.offset, gap.size) == (offsets[9], offsets[10] - offsets[9])
    assert gap.after == "0008.jpg"
    content = (tmp_path / "s.tar").read_bytes()
    for number, (_, offset, size) in zip(numbers(members), members, strict=True):
        assert content[offset : offset + size] == bytes([number + 1]) * (1500 + number)


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_the_header_behind_a_long_name_counts_too(tmp_path, kind):
    offsets = write_tar(tmp_path / "s.tar", kind, prefix="deep/" * 40)
    overwrite(tmp_path / "s.tar", offsets[10] - 4 * BLOCK, b"\xff" * BLOCK)  # of member 9
    gaps = []
    assert numbers(read_members(str(tmp_path / "s.tar"), gaps)) == [
        n for n in range(COUNT) if n != 9
    ]
    assert len(gaps) == 1


def test_a_tail_of_garbage_is_a_gap(tmp_path):
    offsets = write_tar(tmp_path / "s.tar")
    length = (tmp_path / "s.tar").stat().st_size
    overwrite(tmp_path / "s.tar", offsets[10], b"\xa5" * (length - offsets[10]))
    gaps = []
    assert numbers(read_members(str(tmp_path / "s.tar"), gaps)) == list(range(10))
    assert [(gap.offset, gap.size) for gap in gaps] == [(offsets[10], length - offsets[10])]


@pytest.mark.parametrize("padding", [0, 1, BLOCK, 40 * BLOCK, 3000 * BLOCK])
def test_a_good_file_has_no_gap_however_it_is_padded(tmp_path, padding):
    offsets = write_tar(tmp_path / "s.tar")
    whole = (tmp_path / "s.tar").read_bytes()
    end = offsets[-1] + BLOCK + 4 * BLOCK
    (tmp_path / "s.tar").write_bytes(whole[:end] + b"\0" * padding)
    gaps = []
    assert len(list(read_members(str(tmp_path / "s.tar"), gaps))) == COUNT
    assert gaps == []


def test_other_members_than_files_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("other")
            info.type = kind
            tar.addfile(info)
        info = tarfile.TarInfo("1.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    gaps = []
    assert list(read_members(str(tmp_path / "s.tar"), gaps)) == [Member("1.jpg", 2048, 3)]
    assert gaps == []


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.9])
def test_a_file_that_is_cut_off_is_an_error(tmp_path, part):
    offsets = write_tar(tmp_path / "s.tar")
    whole = (tmp_path / "s.tar").read_bytes()[: offsets[-1] + 1000]
    (tmp_path / "s.tar").write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(KsclError, match=r"s\.tar cannot be read"):
        list(read_members(str(tmp_path / "s.tar"), []))


def test_a_negative_size_does_not_lead_around_for_ever(tmp_path):
    write_tar(tmp_path / "s.tar", tarfile.GNU_FORMAT)
    with tarfile.open(tmp_path / "s.tar") as tar:
        second = tar.getmembers()[1]
        header = bytearray(second.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 8 + (-3 * BLOCK).to_bytes(4, "big", signed=True)  # base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    overwrite(tmp_path / "s.tar", second.offset, bytes(header))
    with contextlib.suppress(KsclError):  # older versions of Python accept the header
        assert len(list(read_members(str(tmp_path / "s.tar"), []))) <= COUNT
