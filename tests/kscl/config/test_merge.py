"""The config system as a user meets it: strict keys, readable errors, all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kscl.config import config_values, config_yaml, leaves, save_config
from kscl.engine.pretrain import derived_values
from kscl.engine.schedule import learning_rate
from kscl.errors import ConfigError
from kscl.keys import PRETRAIN, load_config
from kscl.views.recipes import RECIPES


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def errors_of(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(*args, **kwargs)  # type: ignore[arg-type]
    return str(error.value)


def test_the_defaults_are_valid_and_frozen():
    cfg = load_config()
    assert cfg.METHOD.NUM_SHOTS == 5
    with pytest.raises(AttributeError):
        cfg.METHOD.NUM_SHOTS = 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SEED: 1\nMETHOD:\n  NUM_SHOT: 3\n", ":3: METHOD.NUM_SHOT is not a key; did you mean "),
        ("METHD:\n  RHO: 1\n", ":2: METHD.RHO is not a key; did you mean METHOD.RHO"),
        ("METHD:\n  RHO: 1\n  NUM_SHOTS: 3\n", ":3: METHD.NUM_SHOTS is not a key"),
        ("SEED: 1\nSEED: 2\n", ":2: SEED"),
        ("AUGMENT:\n  - {op: grayscale, p: 0.1, p: 0.2}\n", ":2: p appears twice"),
        ("OUTPUT_DIR: 2024-99-99\n", ":1: OUTPUT_DIR"),
        ("_BASE_: nowhere.yaml\n", ":1: _BASE_ nowhere.yaml: no such file"),
        ("a: [", ""),
        ("- 1\n- 2\n", ""),
        ("just text", ""),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path, text, says):
    file = write(tmp_path / "x.yaml", text)
    assert f"{file}{says}" in errors_of(file)
    above = write(tmp_path / "y.yaml", "_BASE_: x.yaml\n")
    assert f"{file}{says}" in errors_of(above)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("SOLVER.TEMPERATURE 1", "is not a key; did you mean METHOD.TEMPERATURE"),
        ("method.rho 1", "is not a key; did you mean METHOD.RHO"),
        ("METHD.RHO 1", "is not a key; did you mean METHOD.RHO"),
        ("SOLVR 1", "is not a key; did you mean SOLVER"),
        ("SEEDS 1", "is not a key; did you mean SEED"),
        ("SEED 1 --resume", "--resume"),
        ("SEED --resume 1", "--resume"),
        ("SEED 1 METHOD.RHO", "'METHOD.RHO' is left over"),
        ("METHOD.RHO 0", "METHOD.RHO"),
        ("METHOD.RHO 1.01", "METHOD.RHO"),
        ("METHOD.RHO .nan", "METHOD.RHO"),
        ("METHOD.RHO inf", "METHOD.RHO"),
        ("SOLVER.EPOCHS 1.5", "a whole number"),
        ("SOLVER.EPOCHS true", "a whole number"),
        ("SOLVER.SCALE_LR 1", "true or false"),
        ("SOLVER.MILESTONES 120", "a list"),
        ("SOLVER.MILESTONES [a]", "a whole number"),
        ("METHOD 3", "a section with keys of its own"),
        ("SOLVER.BASE_LR null", "a number"),
        ("AUGMENT moco_v3", f"AUGMENT takes a list or one of {', '.join(RECIPES)}, not 'moco_v3'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_problem_in_words(words, says):
    text = errors_of(None, words.split())
    assert text.startswith("1 problem in the configuration:")
    assert says in text


def test_all_violations_are_reported_at_once(tmp_path):
    file = write(
        tmp_path / "x.yaml",
        "SEED: one\nMETHOD:\n  NUM_SHOTS: 0\n  RHO: 1.5\n  TEMPERATURE: 0\nNOPE: 1\n"
        "DICTIONARY:\n  QUEUE_LENGTH: 16\n",
    )
    text = errors_of(file, ["SOLVER.EPOCHS", "ten", "PROJECTOR.TYPE", "deep"])
    assert text.startswith("8 problems in the configuration:")
    for part in (
        f"{file}:1: SEED takes a whole number, not 'one'",
        f"METHOD.NUM_SHOTS is 0 ({file}:3): must be at least 1",
        f"METHOD.RHO is 1.5 ({file}:4): must be in (0, 1]",
        f"METHOD.TEMPERATURE is 0.0 ({file}:5): must be greater than 0",
        "NOPE is not a key",
        f"DICTIONARY.QUEUE_LENGTH is 16 ({file}:8), SOLVER.BATCH_SIZE is 256 (default): the queue",
        "command line: SOLVER.EPOCHS takes a whole number, not 'ten'",
        "PROJECTOR.TYPE is 'deep' (command line): must be one of mlp, ",
    ):
        assert part in text


def test_files_inherit_by_base_and_the_later_wins(tmp_path):
    write(tmp_path / "a.yaml", "METHOD:\n  NUM_SHOTS: 3\n  RHO: 0.9\n")
    write(tmp_path / "b.yaml", "_BASE_: a.yaml\nMETHOD:\n  RHO: 0.5\n")
    file = write(tmp_path / "c.yaml", "_BASE_: b.yaml\nSEED: 7\n")
    cfg = load_config(file, ["SEED", "8"])
    assert (cfg.METHOD.NUM_SHOTS, cfg.METHOD.RHO, cfg.SEED) == (3, 0.5, 8)


def test_a_base_that_goes_in_a_circle_is_an_error(tmp_path):
    write(tmp_path / "b.yaml", "_BASE_: c.yaml\n")
    assert "circle" in errors_of(write(tmp_path / "c.yaml", "_BASE_: b.yaml\n"))


def test_yaml_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    canary = tmp_path / "ran"
    tag = "!!python/object/apply:os.system"
    file = write(tmp_path / "x.yaml", f"OUTPUT_DIR: {tag} ['touch {canary}']\n")
    text = errors_of(file)
    assert f"{file}:1: OUTPUT_DIR" in text
    assert tag.removeprefix("!!") in text
    assert not canary.exists()


def test_yaml_anchors_are_merged_and_the_mappings_own_keys_win(tmp_path):
    text = "METHOD: &a {RHO: 0.5, NUM_SHOTS: 3}\nBACKBONE:\n  KWARGS: {<<: *a, RHO: 1}\n"
    cfg = load_config(write(tmp_path / "x.yaml", text))
    assert dict(cfg.BACKBONE.KWARGS) == {"RHO": 1, "NUM_SHOTS": 3}


def test_a_missing_file_names_the_nearest_shipped_one():
    assert "kscl_k5_rho40_r50_200ep.yaml" in errors_of("pretrain/kscl_k5_rho40_r50.yaml")


def test_a_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pretrain/moco_v2_r50_200ep.yaml", "configs/pretrain/moco_v2_r50_200ep.yaml"):
        assert load_config(name).LABEL == "moco_v2"


def test_numbers_are_read_as_a_person_means_them(tmp_path):
    file = write(tmp_path / "x.yaml", "SOLVER:\n  WEIGHT_DECAY: 1e-6\n  BASE_LR: 1\n")
    words = ["SOLVER.MILESTONES", "[10,20]", "INPUT.MEAN", "(0,0,0)", "OUTPUT_DIR", "0123"]
    cfg = load_config(file, words)
    assert cfg.SOLVER.WEIGHT_DECAY == 1e-6
    assert cfg.OUTPUT_DIR == "0123"  # text is taken literally
    assert isinstance(cfg.SOLVER.BASE_LR, float)
    assert cfg.SOLVER.MILESTONES == [10, 20]
    assert cfg.INPUT.MEAN == [0.0, 0.0, 0.0]


def test_backbone_arguments_are_free(tmp_path):
    file = write(tmp_path / "x.yaml", "BACKBONE:\n  KWARGS: {channels: [16, 32, 64, 128]}\n")
    cfg = load_config(file, ["BACKBONE.KWARGS.drop_rate", "0.1"])
    assert dict(cfg.BACKBONE.KWARGS) == {"channels": [16, 32, 64, 128], "drop_rate": 0.1}


def test_the_printed_config_can_be_fed_back(tmp_path):
    cfg = load_config("pretrain/simclr_r50_200ep.yaml", ["BACKBONE.KWARGS.channels", "[8, 16]"])
    again = load_config(save_config(cfg, tmp_path))
    assert again == cfg
    assert yaml.safe_load(config_yaml(again)) == yaml.safe_load(config_yaml(cfg))


def test_the_printed_config_has_one_key_per_line_with_its_comment():
    cfg = load_config(None, ["BACKBONE.KWARGS.channels", "[8, 16]"])
    lines = PRETRAIN.print(cfg).splitlines()
    for key, value in leaves(cfg):
        name = f"{'  ' * key.count('.')}{key.rpartition('.')[2]}:"
        assert sum(line.startswith(name) for line in lines) >= 1, key
        assert not isinstance(value, str) or len(value.splitlines()) <= 1
    assert "  NUM_SHOTS: 5  # Key views per image (the paper's K)." in lines
    assert "  channels: [8, 16]" in [line.removeprefix("  ") for line in lines]
    assert yaml.safe_load("\n".join(lines)) == config_values(cfg)


@pytest.mark.parametrize("value", ["", "a: b # c", "off", "0123", "two\nlines", "' \"", "x" * 200])
def test_a_printed_text_can_be_fed_back_whatever_it_holds(value, tmp_path):
    words = ["DATA.TRAIN", value, "BACKBONE.KWARGS.on", repr(value)]
    cfg = load_config(None, words)
    printed = PRETRAIN.print(cfg)
    assert load_config(write(tmp_path / "x.yaml", printed)) == cfg


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_or_written_out_with_the_same_hash(name, tmp_path):
    by_name = load_config(None, ["AUGMENT", name])
    file = write(tmp_path / "x.yaml", f"AUGMENT: {name}\n")
    written_out = write(tmp_path / "y.yaml", yaml.safe_dump({"AUGMENT": RECIPES[name]}))
    assert list(by_name.AUGMENT) == list(RECIPES[name])
    assert by_name == load_config(file) == load_config(written_out)
    assert PRETRAIN.hash(by_name) == PRETRAIN.hash(load_config(written_out))
    by_name.AUGMENT[0]["op"] = "changed"
    assert load_config(file).AUGMENT[0]["op"] != "changed"  # a recipe cannot be changed by a user


def test_the_hash_ignores_what_does_not_change_results():
    plain = PRETRAIN.hash(load_config())
    without_effect = ["OUTPUT_DIR", "/elsewhere", "DATA.NUM_WORKERS", "0", "LOG.PERIOD", "1"]
    assert PRETRAIN.hash(load_config(None, [*without_effect, "DATA.TRAIN", "/data"])) == plain
    for key, value in (("SEED", "1"), ("METHOD.RHO", "0.9"), ("BACKBONE.KWARGS.a", "1")):
        assert PRETRAIN.hash(load_config(None, [key, value])) != plain


def test_the_learning_rate_follows_the_batch_and_says_so():
    cfg = load_config(None, ["SOLVER.BATCH_SIZE", "64"])
    assert learning_rate(cfg) == pytest.approx(0.0075)
    assert "batch 64 → learning rate 0.0075 by linear scaling" in "\n".join(derived_values(cfg))
    fixed = load_config(None, ["SOLVER.BATCH_SIZE", "64", "SOLVER.SCALE_LR", "False"])
    assert learning_rate(fixed) == 0.03
    assert "not scaled" in derived_values(fixed)[0]


def test_derived_values_tell_the_cost_of_the_shots_and_the_size_of_the_queue():
    lines = "\n".join(derived_values(load_config()))
    assert "K = 5 → 6 views" in lines
    assert "2.00 times" in lines
    assert "65,536 subspaces x 2 x 128 → 64.0 MiB" in lines
