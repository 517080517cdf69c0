"""Where a number comes from, told in a checkout."""

from __future__ import annotations

import subprocess

from kscl.records.provenance import _from_git, code_version, library_versions, source_hash
from kscl.runtime.machine import hardware


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


def test_code_is_changed_by_its_packages_and_by_no_document(tmp_path):
    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    source, document = tmp_path / "kscl" / "code.py", tmp_path / "RESULTS.md"
    source.parent.mkdir()
    source.write_text("1\n")
    document.write_text("one\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    document.write_text("two\n")
    assert _from_git(tmp_path)[1] is False
    source.write_text("2\n")
    assert _from_git(tmp_path)[1] is True
