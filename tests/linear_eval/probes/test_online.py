"""The online probe: the cached one's equal without augmentation, resumable, parallel, frozen."""

from __future__ import annotations

import json
import shutil
import signal
import sys

import pytest
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.errors import KsclError
from kscl.records.record import read_record
from linear_eval.backbone import freeze, load
from linear_eval.commands.linear_eval import main
from linear_eval.images import open_data
from linear_eval.probes.online import Online
from tests.helpers.commands import ROOT, run, tool
from tests.helpers.data.digits import NARROW, config, overrides
from tests.helpers.networks.checkpoints import solo_learn_byol

PLAIN = ("INPUT.AUGMENT", "center")


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory):
    """The record of an online probe that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(overrides(digits, folder)) == 0
    return read_record(folder / "record.json")


def curve(record) -> list[float]:
    return record["details"]["curves"]["train_loss"]


def test_without_augmentation_the_online_and_the_cached_probe_agree(digits, tmp_path):
    assert main(overrides(digits, tmp_path / "online", *PLAIN)) == 0
    cached = ("PROBE", "cached", "CACHED.VIEWS", "[center]", "CACHED.STANDARDIZE", False)
    grid = ("CACHED.LRS", "[0.1]", "CACHED.WEIGHT_DECAYS", "[0.0]")
    assert main(overrides(digits, tmp_path / "cached", *cached, *grid)) == 0
    one, other = (read_record(tmp_path / name / "record.json") for name in ("online", "cached"))
    assert curve(one) == pytest.approx(curve(other), abs=1e-4)
    assert one["details"]["curves"]["val_loss"][-1] == pytest.approx(
        other["details"]["val_loss"], abs=1e-4
    )
    # The two round differently, which may turn one of the 60 images where two classes are as good.
    assert one["metrics"] == pytest.approx(other["metrics"], abs=100 / 60 + 1e-6)


def test_the_last_epoch_is_reported_and_the_best_is_marked_as_picked_on_val(undisturbed):
    curves, best = (
        undisturbed["details"]["curves"],
        undisturbed["details"]["best_epoch_picked_on_val"],
    )
    assert undisturbed["details"]["reported"] == "last epoch"
    assert undisturbed["metrics"]["top1"] == curves["val_top1"][-1]
    assert best["top1"] == max(curves["val_top1"])
    assert best["picked_on"] == "val"
    assert curves["lr"] == pytest.approx([0.1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("step", [3, 10])  # of 5 an epoch: inside one, at the end of one
def test_a_stopped_run_goes_on_to_the_same_number(
    digits, tmp_path, monkeypatch, undisturbed, step, capsys
):
    take_step = Online.take_step

    def and_signal(self, *arguments):
        if self.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        take_step(self, *arguments)

    words = overrides(digits, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Online, "take_step", and_signal)
        assert main(words) == 128 + signal.SIGTERM
    assert not (tmp_path / "run/record.json").exists()
    other = shutil.copytree(digits / "val", tmp_path / "val")
    next(other.rglob("*.png")).unlink()
    assert main(["--resume", *words, "DATA.VAL", str(other)]) == 2
    assert f"DATA.VAL {other}" in capsys.readouterr().err
    assert main(["--resume", *words]) == 0
    record = read_record(tmp_path / "run/record.json")
    assert record["metrics"] == undisturbed["metrics"]
    assert record["details"]["curves"] == undisturbed["details"]["curves"]


def test_a_crashed_run_goes_on_from_its_last_checkpoint(digits, tmp_path, monkeypatch, undisturbed):
    take_step = Online.take_step

    def and_crash(self, *arguments):
        if self.step == 13:
            raise ZeroDivisionError
        take_step(self, *arguments)

    words = overrides(digits, tmp_path / "run", "CHECKPOINT.SECONDS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Online, "take_step", and_crash)
        with pytest.raises(ZeroDivisionError):
            main(words)
    assert main(["--auto-resume", *words]) == 0
    record = read_record(tmp_path / "run/record.json")
    assert record["details"]["curves"] == undisturbed["details"]["curves"]


@pytest.mark.full
def test_torchrun_gives_the_number_of_one_process(digits, tmp_path, undisturbed):
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    script = ROOT / "tools/linear_eval.py"
    done = run(*torchrun, "--nproc-per-node", "2", script, *overrides(digits, tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("random: top-1") == 1
    record = read_record(tmp_path / "run/record.json")
    assert record["details"]["processes"] == 2
    assert curve(record) == pytest.approx(curve(undisturbed), abs=1e-5)


@pytest.mark.full
def test_half_precision_of_the_backbone_changes_the_loss_but_little(digits, tmp_path, undisturbed):
    # A process of its own: CPUs that only pretend to have matrix tiles need a setting at its start.
    done = tool("linear_eval", *overrides(digits, tmp_path / "run", "SOLVER.AMP", "bf16"))
    assert done.returncode == 0, done.stderr
    assert "random: top-1" in done.stdout
    record = read_record(tmp_path / "run/record.json")
    assert curve(record) == pytest.approx(curve(undisturbed), rel=0.02)
    assert record["protocol"]["hash"] != undisturbed["protocol"]["hash"]


def test_a_backbone_that_changed_is_an_error_and_leaves_no_record(
    digits, tmp_path, monkeypatch, capsys
):
    build = Online.build

    def in_training_mode(self):
        self.frozen.module.train()
        return build(self)

    monkeypatch.setattr(Online, "build", in_training_mode)
    assert main(overrides(digits, tmp_path / "run")) == 2
    assert "tensors changed" in capsys.readouterr().err
    assert not (tmp_path / "run/record.json").exists()


def test_a_learning_rate_that_diverges_is_told(digits, tmp_path, capsys):
    assert main(overrides(digits, tmp_path / "run", "SOLVER.BASE_LR", 1e38)) == 2
    assert "Lower SOLVER.BASE_LR" in capsys.readouterr().err


def test_random_weights_are_calibrated_by_default_and_only_their_statistics(digits, tmp_path):
    cfg = config(digits, tmp_path)
    train, _ = open_data(cfg)
    calibrated = freeze(cfg, train)
    kept = freeze(config(digits, tmp_path, "BACKBONE.BATCH_NORM", "keep"), train)
    assert (calibrated.calibrated_on, kept.calibrated_on) == (64, 0)
    for name, value in kept.module.state_dict().items():
        same = torch.equal(value, calibrated.module.state_dict()[name])
        assert same == ("running" not in name and "tracked" not in name), name
    assert not any(module.training for module in calibrated.module.modules())
    assert not any(weight.requires_grad for weight in calibrated.module.parameters())
    assert not calibrated.features(torch.zeros(2, 3, 24, 24, dtype=torch.uint8)).requires_grad
    again = freeze(cfg, train)
    assert again.tensors_sha256 == calibrated.tensors_sha256


def test_statistics_of_a_network_with_the_same_weights_are_its_own(digits, tmp_path):
    other = f"{NARROW[:-1]}, act_layer: gelu}}"
    caches = {name: ("DATA.CACHE_DIR", tmp_path / name) for name in ("shared", "own")}
    train, _ = open_data(config(digits, tmp_path))
    freeze(config(digits, tmp_path, *caches["shared"]), train)
    in_shared, in_own = (
        freeze(config(digits, tmp_path, "BACKBONE.KWARGS", other, *cache), train)
        for cache in caches.values()
    )
    assert in_shared.loaded.tensors_sha256 == in_own.loaded.tensors_sha256
    assert in_shared.tensors_sha256 == in_own.tensors_sha256


def test_a_mean_that_contradicts_the_file_is_refused(digits, tmp_path):
    cfg = config(digits, tmp_path)
    kwargs = json.loads(json.dumps(cfg.BACKBONE.KWARGS))
    tensors = load_backbone("random", "resnet18", kwargs).backbone.state_dict()
    half = (0.5, 0.5, 0.5)
    save_backbone(tmp_path / "b.safetensors", tensors, Description("resnet18", kwargs, half, half))
    train, _ = open_data(cfg)
    words = ("BACKBONE.WEIGHTS", tmp_path / "b.safetensors")
    taken = freeze(config(digits, tmp_path, *words), train)
    assert taken.mean.flatten().tolist() == [0.5, 0.5, 0.5]
    more = ("INPUT.MEAN", "[0.1, 0.1, 0.1]", "INPUT.STD", "[1, 1, 1]")
    with pytest.raises(KsclError, match=r"b\.safetensors.*mean"):
        freeze(config(digits, tmp_path, *words, *more), train)


def test_a_file_of_another_project_is_asked_for_its_input_and_its_place(digits, tmp_path, caplog):
    cfg = config(digits, tmp_path)
    kwargs = json.loads(json.dumps(cfg.BACKBONE.KWARGS))
    one, two = (
        load_backbone("random", "resnet18", kwargs, seed).backbone.state_dict() for seed in (1, 2)
    )
    torch.save(solo_learn_byol(one, two), tmp_path / "solo.pth")
    words = ("BACKBONE.WEIGHTS", tmp_path / "solo.pth", "BACKBONE.NAME", "resnet18")
    with pytest.raises(KsclError, match=r"INPUT\.MEAN"):
        load(config(digits, tmp_path, *words))
    words += ("INPUT.MEAN", "[0, 0, 0]", "INPUT.STD", "[1, 1, 1]")
    with caplog.at_level("INFO"):
        load(config(digits, tmp_path, *words))
    assert "momentum backbone" in caplog.text
    words += ("BACKBONE.CONTAINER", "state_dict", "BACKBONE.PREFIX", "momentum_backbone.")
    momentum = load(config(digits, tmp_path, *words))
    assert torch.equal(momentum.backbone.state_dict()["conv1.weight"], two["conv1.weight"])
    assert list(momentum.description.std) == [1, 1, 1]
