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


def test_a_misspelled_key_in_a_file_names_the_key_the_line_and_the_nearest_name(tmp_path):
    file = write(tmp_path / "x.yaml", "SEED: 1\nMETHOD:\n  NUM_SHOT: 3\n")
    text = errors_of(file)
    assert f"{file}:3: METHOD.NUM_SHOT is not a key; did you mean METHOD.NUM_SHOTS" in text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("SOLVER.TEMPERATURE", "METHOD.TEMPERATURE"),  # right name, wrong section
        ("method.rho", "METHOD.RHO"),
        ("METHD.RHO", "METHOD.RHO"),
        ("SOLVR", "SOLVER"),
        ("SEEDS", "SEED"),
    ],
)
def test_a_misspelled_override_names_the_nearest_key(written, meant):
    assert f"command line: {written} is not a key; did you mean {meant}" in errors_of(
        None, [written, "1"]
    )


@pytest.mark.parametrize("words", [["SEED", "1", "--resume"], ["SEED", "--resume", "1"]])
def test_an_option_after_the_overrides_is_told_to_go_before_them(words):
    with pytest.raises(ConfigError) as error:
        load_config(None, words)
    assert str(error.value).startswith("1 problem")
    assert "--resume" in str(error.value)


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
        "PROJECTOR.TYPE is 'deep' (command line): must be one of mlp, mlp_bn, simclr, linear",
    ):
        assert part in text


@pytest.mark.parametrize("value", ["0", "-0.1", "1.01", ".nan", "nan", "inf"])
def test_rho_outside_its_interval_is_refused(value):
    assert "METHOD.RHO" in errors_of(None, ["METHOD.RHO", value])


def test_an_override_without_a_value_is_named():
    assert "'METHOD.RHO' is left over" in errors_of(None, ["SEED", "1", "METHOD.RHO"])


def test_files_inherit_by_base_and_the_later_wins(tmp_path):
    write(tmp_path / "a.yaml", "METHOD:\n  NUM_SHOTS: 3\n  RHO: 0.9\n")
    write(tmp_path / "b.yaml", "_BASE_: a.yaml\nMETHOD:\n  RHO: 0.5\n")
    file = write(tmp_path / "c.yaml", "_BASE_: b.yaml\nSEED: 7\n")
    cfg = load_config(file, ["SEED", "8"])
    assert (cfg.METHOD.NUM_SHOTS, cfg.METHOD.RHO, cfg.SEED) == (3, 0.5, 8)


def test_an_error_in_a_base_file_names_that_file(tmp_path):
    base = write(tmp_path / "a.yaml", "METHOD:\n  RHOO: 0.9\n")
    file = write(tmp_path / "b.yaml", "_BASE_: a.yaml\n")
    assert f"{base}:2: METHOD.RHOO" in errors_of(file)


def test_a_base_that_is_missing_or_goes_in_a_circle_is_an_error(tmp_path):
    file = write(tmp_path / "a.yaml", "_BASE_: nowhere.yaml\n")
    assert "_BASE_ nowhere.yaml: no such file" in errors_of(file)
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


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    file = write(tmp_path / "x.yaml", "SEED: 1\nSEED: 2\n")
    assert f"{file}:2: SEED" in errors_of(file)


def test_a_key_that_stands_twice_inside_a_value_is_an_error(tmp_path):
    file = write(tmp_path / "x.yaml", "AUGMENT:\n  - {op: grayscale, p: 0.1, p: 0.2}\n")
    assert f"{file}:2: p appears twice" in errors_of(file)


def test_a_date_that_cannot_be_is_an_error(tmp_path):
    file = write(tmp_path / "x.yaml", "OUTPUT_DIR: 2024-99-99\n")
    assert f"{file}:1: OUTPUT_DIR" in errors_of(file)


def test_an_unknown_section_names_each_of_its_keys(tmp_path):
    file = write(tmp_path / "x.yaml", "METHD:\n  RHO: 0.5\n  NUM_SHOTS: 3\n")
    text = errors_of(file)
    assert f"{file}:2: METHD.RHO is not a key; did you mean METHOD.RHO" in text
    assert f"{file}:3: METHD.NUM_SHOTS is not a key; did you mean METHOD.NUM_SHOTS" in text


def test_yaml_anchors_are_merged_and_the_mappings_own_keys_win(tmp_path):
    text = "METHOD: &a {RHO: 0.5, NUM_SHOTS: 3}\nBACKBONE:\n  KWARGS: {<<: *a, RHO: 1}\n"
    cfg = load_config(write(tmp_path / "x.yaml", text))
    assert dict(cfg.BACKBONE.KWARGS) == {"RHO": 1, "NUM_SHOTS": 3}


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "just text"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path, text):
    file = write(tmp_path / "x.yaml", text)
    assert str(file) in errors_of(file)


def test_a_missing_file_names_the_nearest_shipped_one():
    assert "kscl_k5_rho40_r50_200ep.yaml" in errors_of("pretrain/kscl_k5_rho40_r50.yaml")


def test_a_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pretrain/moco_v2_r50_200ep.yaml", "configs/pretrain/moco_v2_r50_200ep.yaml"):
        assert load_config(name).LABEL == "moco_v2"


def test_numbers_are_read_as_a_person_means_them(tmp_path):
    file = write(tmp_path / "x.yaml", "SOLVER:\n  WEIGHT_DECAY: 1e-6\n  BASE_LR: 1\n")
    cfg = load_config(file, ["SOLVER.MILESTONES", "(10, 20)", "INPUT.MEAN", "[0, 0, 0]"])
    assert cfg.SOLVER.WEIGHT_DECAY == 1e-6
    assert isinstance(cfg.SOLVER.BASE_LR, float)
    assert cfg.SOLVER.MILESTONES == [10, 20]
    assert cfg.INPUT.MEAN == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("SOLVER.EPOCHS", "1.5", "a whole number"),
        ("SOLVER.EPOCHS", "true", "a whole number"),
        ("SOLVER.SCALE_LR", "1", "true or false"),
        ("SOLVER.MILESTONES", "120", "a list"),
        ("SOLVER.MILESTONES", "[a]", "a whole number"),
        ("METHOD", "3", "a section with keys of its own"),
        ("SOLVER.BASE_LR", "null", "a number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_words(key, value, wanted):
    assert wanted in errors_of(None, [key, value])


def test_text_is_taken_to_the_letter():
    assert load_config(None, ["OUTPUT_DIR", "0123"]).OUTPUT_DIR == "0123"


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


def test_an_unknown_recipe_names_those_that_there_are():
    text = errors_of(None, ["AUGMENT", "moco_v3"])
    assert all(name in text for name in ("AUGMENT", "moco_v3", *RECIPES))


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
