"""Where a number comes from, told in a checkout."""

from __future__ import annotations

from kscl.provenance import code_version, hardware, library_versions, source_hash


def test_the_code_version_names_a_commit_or_says_that_it_does_not_know():
    version = code_version()
    assert version["version"]
    assert version["commit"] is None or len(str(version["commit"])) == 40
    assert version["dirty"] in (True, False, None)
    assert version["source_hash"] == source_hash()


def test_each_kind_of_record_has_the_hash_of_the_code_that_can_change_it():
    hashes = [source_hash(kind) for kind in ("pretrain", "linear", "detection", None)]
    assert len(set(hashes)) == 4
    assert source_hash("linear") == source_hash("knn")


def test_libraries_and_hardware_are_named():
    assert library_versions()["timm"]
    assert hardware()["memory_gib"] > 0
