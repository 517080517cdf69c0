"""Every name of an earlier version is an error that says the new one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from detection.config import load_detection_config
from kscl.benchmark.suite.spec import read_suite
from kscl.cli import RENAMED_OPTIONS
from kscl.config.merge import load_config
from kscl.config.renamed import KEYS, SHAPES_KEYS, SUITE_KEYS, VALUES
from kscl.config.tree import nested
from kscl.errors import ConfigError
from linear_eval.config import load_linear_eval_config

# Old key: the loader of the tree that had it, and a value that the new key takes.
WHERE = {
    "METHOD.NAME": (load_config, "simclr"),
    "NAME": (load_linear_eval_config, "mine"),
    "HEAD.TYPE": (load_config, "mlp"),
    "HEAD.HIDDEN_DIM": (load_config, 8),
    "HEAD.DIM": (load_config, 8),
    "DATA.UINT8": (load_config, True),
    "DATA.BAD_IMAGES_MAX_SHARE": (load_config, 0.5),
    "SOLVER.LR": (load_linear_eval_config, 3.0),
    "SOLVER.ACCUMULATE": (load_config, 2),
    "SOLVER.SCHEDULE_BY": (load_config, "epoch"),
    "KSCL.NUM_GPUS": (load_detection_config, 8),
}
NEW = {
    **{old: new for old, new in KEYS.items() if old != "HEAD"},
    **{f"HEAD.{name}": f"PROJECTOR.{name}" for name in ("TYPE", "HIDDEN_DIM", "DIM")},
}
OLD_VALUES = [
    (load_config, "SOLVER.LR_UPDATE", "step", "iter"),
    (load_linear_eval_config, "INPUT.AUGMENT", "centre", "center"),
    (load_linear_eval_config, "CACHED.VIEWS", ["centre", "flip"], "center"),
]
# Old option: a tool that has the new one, and what else it needs.
TOOLS = [
    ("linear_eval.commands.linear_eval", "--seeds"),
    ("detection.commands.train_net", "--trials"),
    ("kscl.commands.leaderboard", "--against"),
    ("detection.commands.convert", "--output"),
    ("kscl.commands.make_shapes", "--output"),
    ("kscl.commands.make_shapes", "--unlabelled"),
]


def test_every_old_name_is_tried_here():
    assert set(WHERE) == set(NEW)
    assert {key for _, key, *_ in OLD_VALUES} == set(VALUES)
    assert {option for _, option in TOOLS} == set(RENAMED_OPTIONS)


@pytest.mark.parametrize("old", WHERE)
def test_an_old_key_is_an_error_that_names_the_new_one(old, tmp_path):
    load, value = WHERE[old]
    with pytest.raises(ConfigError, match=rf"{old} .*\b{NEW[old]}\.$"):
        load(None, [old, str(value)])
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(nested({old: value})))
    with pytest.raises(ConfigError) as error:
        load(file)
    assert f"{file}:{1 + old.count('.')}: {old}" in str(error.value)
    assert f" {NEW[old]}." in str(error.value)
    load(None, [NEW[old], str(value)])  # which is a key, and takes the value


def name_of(value):
    return getattr(value, "__name__", str(value))  # a function's address differs between workers


@pytest.mark.parametrize(("load", "key", "old", "new"), OLD_VALUES, ids=name_of)
def test_an_old_value_is_an_error_that_names_the_new_one(load, key, old, new):
    with pytest.raises(ConfigError) as error:
        load(None, [key, str(old)])
    assert str(error.value).startswith("1 problem")
    assert key in str(error.value)
    assert f" {new}." in str(error.value)
    load(None, [key, str([new, "flip"]) if isinstance(old, list) else new])


@pytest.mark.parametrize(("module", "old"), TOOLS)
@pytest.mark.parametrize("joined", [False, True])
def test_an_old_option_is_an_error_that_names_the_new_one(module, old, joined, capsys):
    main = importlib.import_module(module).main
    with pytest.raises(SystemExit) as stop:
        main([f"{old}=3"] if joined else [old, "3"])
    assert stop.value.code == 2
    assert f"{old} has been renamed: write {RENAMED_OPTIONS[old]}." in capsys.readouterr().err


def test_an_option_that_is_still_called_so_is_not_taken_for_an_old_one(capsys):
    main = importlib.import_module("kscl.commands.visualize_training").main
    main(["nowhere", "--output", "x.png"])
    assert "renamed" not in capsys.readouterr().err


def suite_file(folder: Path, **more: object) -> Path:
    suite = {
        "name": "x",
        "output_dir": "y",
        "contenders": {"random": {"arch": "resnet50"}},
        "evaluations": {"knn": {"config": "linear_eval/knn.yaml"}},
    }
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(suite | more))
    return path


@pytest.mark.parametrize("old", SUITE_KEYS)
def test_an_old_suite_key_is_an_error_that_names_the_new_one(old, tmp_path):
    with pytest.raises(ConfigError, match=rf"{old} .*\b{SUITE_KEYS[old]}\."):
        read_suite(suite_file(tmp_path, **{old: ["a"]}))


@pytest.mark.parametrize("old", SHAPES_KEYS)
def test_an_old_key_of_the_shapes_is_an_error_that_names_the_new_one(old, tmp_path):
    with pytest.raises(ConfigError, match=rf"shapes: {old} .*\b{SHAPES_KEYS[old]}\."):
        read_suite(suite_file(tmp_path, shapes={old: "a"}))


def test_old_keys_among_the_overrides_of_a_suite_are_named_when_it_is_read(tmp_path):
    path = suite_file(
        tmp_path,
        contenders={"a": {"pretrain": "pretrain/shapes_moco.yaml", "overrides": {"HEAD.DIM": 8}}},
        evaluations={"knn": {"config": "linear_eval/knn.yaml", "overrides": {"NAME": "x"}}},
    )
    with pytest.raises(ConfigError) as error:
        read_suite(path)
    assert "contender a" in str(error.value)
    assert "PROJECTOR.DIM" in str(error.value)
    assert "evaluation knn: NAME has been renamed: write LABEL." in str(error.value)
