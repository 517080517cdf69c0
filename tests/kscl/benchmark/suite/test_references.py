"""What only the end of a suite needs is looked for when its file is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kscl.benchmark.suite.spec import read_suite
from kscl.commands.run_suite import main
from kscl.errors import KsclError
from tests.helpers.chain import smoke_suite
from tests.helpers.data.sets import write_image


def labeled_suite(folder: Path, baseline: str) -> Path:
    contenders = yaml.safe_load(smoke_suite(folder).read_text())["contenders"]
    contenders["kscl_long"] = contenders.pop("kscl")
    contenders["kscl_long"]["overrides"]["LABEL"] = "kscl"
    return smoke_suite(folder, contenders=contenders, baseline=[baseline])


def test_a_basis_image_that_is_nowhere_is_refused_by_the_tool(tmp_path, capsys):
    path = smoke_suite(tmp_path, basis_image="nowhere.jpg")
    assert main([str(path), "--dry-run"]) == 2
    assert "basis_image: nowhere.jpg: no such file" in capsys.readouterr().err


def test_a_basis_image_may_be_there_or_be_drawn_by_the_suite(tmp_path):
    assert read_suite(smoke_suite(tmp_path)).basis_image  # one of the shapes
    write_image(tmp_path / "one.jpg", seed=0)
    assert read_suite(smoke_suite(tmp_path, basis_image=str(tmp_path / "one.jpg")))
    with pytest.raises(KsclError, match="basis_image"):
        read_suite(smoke_suite(tmp_path, shapes={}))


@pytest.mark.parametrize(
    "baseline", ["random", "kscl", "kscl@2", "kscl@2,K=5,40%", "random@8-64 channels", "0a1b2c3d"]
)
def test_a_baseline_is_a_label_with_or_without_settings_or_the_key_of_a_row(tmp_path, baseline):
    assert read_suite(labeled_suite(tmp_path, baseline)).baseline == [baseline]


@pytest.mark.parametrize(
    ("baseline", "hint"),
    [
        ("randm", "did you mean random?"),
        ("randm@2,K=5", "did you mean random?"),
        ("kscl_long", "did you mean kscl?"),  # rows have the label
        ("xyz", "choose from kscl, random."),
    ],
)
def test_a_baseline_that_no_row_will_have_is_refused(tmp_path, baseline, hint):
    with pytest.raises(KsclError) as error:
        read_suite(labeled_suite(tmp_path, baseline))
    assert f"baseline: {baseline} is the label of no contender; {hint}" in str(error.value)


def test_a_baseline_of_several_lengths_needs_the_epochs_of_one(tmp_path):
    lengths = {"steps": {"kscl": 3}, "lengths": [1, 2]}
    with pytest.raises(KsclError, match="name the epochs of one, as in kscl@30"):
        read_suite(smoke_suite(tmp_path, baseline=["kscl"], **lengths))
    assert read_suite(smoke_suite(tmp_path, baseline=["kscl@2"], **lengths))


def test_a_file_may_be_called_as_it_says_itself(tmp_path):
    (tmp_path / "made.safetensors").write_bytes(b"x")
    contenders = {"theirs": {"file": str(tmp_path / "made.safetensors")}}
    assert read_suite(smoke_suite(tmp_path, contenders=contenders, baseline=["moco_v2"]))
