"""The pretraining tool as a user meets it: what it writes, what it refuses, what it says."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors
import timm
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kscl.engine.pretrain
from kscl.backbone_file import load_backbone
from kscl.benchmark.leaderboard.entries import pretrained
from kscl.commands.pretrain import main
from kscl.engine.metrics_log import METRICS_FILE
from kscl.records import fingerprint
from kscl.records.record import read_record
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from kscl.runtime.logs import LOG_FILE
from tests.helpers.commands import tool
from tests.helpers.runs import Run, draw_images, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
ONE_EPOCH = ["SOLVER.EPOCHS", 1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, images):
    """A run of three epochs with everything switched on; nobody may change it."""
    knn = ["EVAL.KNN_PERIOD", 2, "EVAL.KNN_TRAIN", images, "EVAL.KNN_VAL", images]
    run = Run(tmp_path_factory.mktemp("finished") / "run", images, *knn)
    assert main(run.command()) == 0
    return run


@pytest.mark.smoke
def test_timm_takes_the_backbone_as_it_is(finished):
    path = finished.folder / "backbone.safetensors"
    model = timm.create_model("test_resnet", num_classes=0, checkpoint_path=str(path))
    trained = finished.state()["learner"]
    for name, value in model.state_dict().items():
        assert same_bits(value, trained[f"encoder.backbone.{name}"])


def test_the_backbone_says_what_it_is_and_where_it_comes_from(finished):
    description = load_backbone(finished.folder / "backbone.safetensors").description
    assert (description.arch, description.size) == ("test_resnet", 32)
    assert description.kwargs == {"drop_path_rate": 0.2}
    record = read_record(finished.folder / "record.json")
    source = description.source
    assert source["method"] == "kscl"
    assert (source["num_shots"], source["rho"], source["epochs"]) == (2, 0.9, 3)
    assert source["config_hash"] == record["config"]["hash"]
    assert source["data"] == record["data"]["train"]["hash"]
    assert source["mean_rank"] == record["metrics"]["mean_rank"]


def test_a_checkpoint_is_as_good_a_source_as_the_exported_backbone(finished):
    newest = find_checkpoints(finished.folder / CHECKPOINT_FOLDER)[0]
    from_checkpoint = load_backbone(newest)
    exported = load_backbone(finished.folder / "backbone.safetensors")
    assert from_checkpoint.layout == "kscl checkpoint"
    assert from_checkpoint.tensors_sha256 == exported.tensors_sha256
    assert from_checkpoint.description.arch == exported.description.arch


@pytest.mark.smoke
def test_the_record_holds_the_figures_of_the_run(finished):
    record = read_record(finished.folder / "record.json")
    assert record["kind"] == "pretrain"
    metrics = record["metrics"]
    rows = [json.loads(line) for line in (finished.folder / METRICS_FILE).open()]
    last_epoch = [row["loss"] for row in rows if row.get("epoch", 0) > 2]
    assert metrics["loss"] == pytest.approx(sum(last_epoch) / len(last_epoch))
    assert 1 <= metrics["mean_rank"] <= 2
    assert 0 <= metrics["instance_top1"] <= 1
    assert metrics["bad_images"] == 0
    rate = metrics["images_per_second"]
    assert metrics["views_per_second"] == pytest.approx(3 * rate)
    assert metrics["minutes_per_epoch"] == pytest.approx(96 / rate / 60)
    curves = record["details"]["curves"]
    assert curves["step"] == [3, 6, 9, 12, 15, 18]
    assert (record["details"]["steps"], record["details"]["epochs"]) == (18, 3)
    assert record["details"]["knn_curve"] == [
        [row["step"], row["knn_top1"]] for row in rows if "knn_top1" in row
    ]


def test_a_run_of_so_many_steps_ends_within_an_epoch_and_reports_it(images, tmp_path):
    knn = ["EVAL.KNN_PERIOD", 1, "EVAL.KNN_TRAIN", images, "EVAL.KNN_VAL", images]
    more = ["SOLVER.MAX_STEPS", 8, "INPUT.SIZE", 16, "VIEWS.SMALL.COUNT", 2, "VIEWS.SMALL.SIZE", 8]
    run = Run(tmp_path / "run", images, *knn, *more)
    assert main(run.command()) == 0
    record = read_record(run.folder / "record.json")
    assert (record["details"]["steps"], record["details"]["epochs"]) == (8, pytest.approx(8 / 6))
    assert record["details"]["curves"]["step"] == [3, 6, 8]
    assert [step for step, _ in record["details"]["knn_curve"]] == [6, 8]
    metrics = record["metrics"]
    rate = metrics["images_per_second"]
    assert metrics["minutes_per_epoch"] == pytest.approx(96 / rate / 60)
    assert metrics["views_per_second"] == pytest.approx(5 * rate)
    assert pretrained(record).epochs == 1.3


def test_the_nearest_neighbor_check_runs_every_so_many_epochs_and_at_the_end(finished):
    record = read_record(finished.folder / "record.json")
    assert [step for step, _ in record["details"]["knn_curve"]] == [12, 18]
    assert record["metrics"]["knn_top1"] > 60  # two colors, which even a tiny network tells apart


@pytest.mark.smoke
def test_tensorboard_has_every_figure(finished):
    events = EventAccumulator(str(finished.folder / "tensorboard")).Reload()
    assert {"loss", "learning_rate", "mean_rank", "images_per_second", "knn_top1"} <= set(
        events.Tags()["scalars"]
    )
    rows = [json.loads(line) for line in (finished.folder / METRICS_FILE).open()]
    written = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert written == [(step, pytest.approx(loss)) for step, loss in expected]


def test_the_log_begins_with_what_follows_from_the_settings_and_the_budget(finished):
    log = (finished.folder / LOG_FILE).read_text()
    for words in (
        "batch 16 → learning rate 0.001875 by linear scaling",
        "K = 2 → 3 views per image",
        "96 images, fingerprint",
        "holds the run back",
        "images/s",
        "views/s",
        "left",
    ):
        assert words in log


def test_the_resolved_config_is_kept_and_can_be_fed_back(finished, capsys):
    kept = yaml.safe_load((finished.folder / "config.yaml").read_text())
    assert kept["METHOD"]["TEMPERATURE"] == 0.2  # a default that no file names
    assert main(["--config-file", str(finished.folder / "config.yaml"), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == kept


def test_a_finished_run_is_left_as_it_is(finished, capsys):
    before = (finished.folder / "record.json").read_bytes()
    for flag in ("--resume", "--auto-resume"):
        assert main(finished.command(flag)) == 0
    assert "This run has ended" in capsys.readouterr().err
    assert (finished.folder / "record.json").read_bytes() == before


def test_a_finished_run_does_not_answer_for_other_images(finished, images, tmp_path, capsys):
    other = shutil.copytree(images, tmp_path / "images")
    moved = ["DATA.TRAIN", other]
    assert main(finished.command("--auto-resume", more=moved)) == 0
    assert "This run has ended" in capsys.readouterr().err
    next(other.rglob("*.jpg")).write_bytes(b"changed")
    assert main(finished.command("--auto-resume", more=moved)) == 2
    assert f"DATA.TRAIN {other}" in capsys.readouterr().err


def test_a_finished_run_has_ended_though_its_images_are_gone(images, tmp_path, capsys):
    gone = shutil.copytree(images, tmp_path / "images")
    run = Run(tmp_path / "run", gone, *ONE_EPOCH)
    assert main(run.command()) == 0
    shutil.rmtree(gone)
    assert main(run.command("--auto-resume")) == 0
    assert "This run has ended" in capsys.readouterr().err
    assert main(run.command("--auto-resume", more=["DATA.TRAIN", tmp_path / "nowhere"])) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_run_opens_the_images_once_and_a_resumed_one_reads_its_checkpoint_once(
    images, tmp_path, monkeypatch, capsys
):
    run = Run(tmp_path / "run", images, "SOLVER.EPOCHS", 2)
    (process,) = run.start(before=stop_at_the_first_checkpoint)
    process.join(120)
    assert process.exitcode == 128 + signal.SIGTERM
    assert run.log.read_text().count("96 images in") == 1
    reads = []
    read = torch.load
    monkeypatch.setattr(torch, "load", lambda path, **how: reads.append(path) or read(path, **how))
    steps = kscl.engine.pretrain.Pretraining.steps
    held = []

    def steps_and_look(self):
        gc.collect()
        dicts = (each for each in gc.get_objects() if type(each) is dict)
        held.extend(each for each in dicts if {"learner", "bad_images"} <= each.keys())
        return steps(self)

    monkeypatch.setattr(kscl.engine.pretrain.Pretraining, "steps", steps_and_look)
    assert main(run.command("--resume")) == 0
    assert len(reads) == 1
    assert not held  # the checkpoint's content is not kept for the whole run
    assert capsys.readouterr().err.count("96 images in") == 1


def stop_at_the_first_checkpoint():
    """Ask the process itself to stop, as soon as it has saved its state."""
    rename = Path.rename

    def rename_and_stop(self, to):
        Path.rename = rename  # a second signal would interrupt at once
        os.kill(os.getpid(), signal.SIGTERM)
        return rename(self, to)

    Path.rename = rename_and_stop


def test_the_fingerprint_is_cached_where_the_index_is(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "CACHED_FROM", 10)
    monkeypatch.setenv("KSCL_CACHE", "/dev/null/none")  # as for a user without a home
    images = draw_images(tmp_path / "images", count=16)
    for path in (images, *images.rglob("*")):
        os.utime(path, (1e9, 1e9))  # what changed a moment ago is not cached
    cache = tmp_path / "cache"
    run = Run(tmp_path / "run", images, *ONE_EPOCH, "DATA.CACHE_DIR", cache)
    assert main(run.command()) == 0
    monkeypatch.setattr(fingerprint, "walk_files", None)
    known = fingerprint.fingerprint(images, str(cache))
    assert known.hash == read_record(run.folder / "record.json")["data"]["train"]["hash"]


def test_a_folder_with_a_run_is_refused_without_resume(finished, error_of):
    text = error_of(finished.command())
    assert str(finished.folder) in text
    assert "--resume" in text


def test_a_broken_image_is_skipped_named_once_and_counted(images, tmp_path, capsys):
    some = shutil.copytree(images, tmp_path / "images")
    broken = sorted(some.rglob("*.jpg"))[5]
    broken.write_bytes(broken.read_bytes()[:200])
    words = ["DATA.MAX_BAD_FRACTION", 0.02, "SOLVER.EPOCHS", 2]
    run = Run(tmp_path / "run", some, *words)
    assert main(run.command()) == 0
    assert read_record(run.folder / "record.json")["metrics"]["bad_images"] == 1
    assert capsys.readouterr().err.count(str(broken)) == 1


def test_more_gpus_than_there_are_and_torchrun_with_num_gpus_are_refused(
    finished, error_of, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "1 are visible" in error_of(finished.command("--num-gpus", "4"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    text = error_of(finished.command("--num-gpus", "4"))
    assert "torchrun" in text
    assert "--num-gpus" in text


def test_the_tool_runs_as_a_command_and_its_errors_are_for_people(images, tmp_path, capsys):
    run = Run(tmp_path / "run", images)
    done = tool("pretrain", *run.command("--resume"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f"nothing to resume in {run.folder}" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    for word in ("--config-file", "--num-gpus", "--resume", "--auto-resume", "KEY VALUE"):
        assert word in shown


def test_the_backbones_description_is_in_the_file_itself(finished):
    with safetensors.safe_open(finished.folder / "backbone.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["kscl_backbone"])["arch"] == "test_resnet"
