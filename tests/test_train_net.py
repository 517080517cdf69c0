"""Fine-tuning as a user runs it: refused before it starts if anything is wrong, exact on resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from detection.train_cli import main
from kscl.records import read_record
from tests.commands import ROOT, tool
from tests.voc_sets import Thing, write_voc

# One narrow network and few small RoIs: what is tested is the way, not the numbers.
SMALL = (
    *("MODEL.ROI_HEADS.NUM_CLASSES", "2", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8"),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", "20", "MODEL.RPN.POST_NMS_TOPK_TEST", "20"),
    *("INPUT.MIN_SIZE_TRAIN", "(64, 80)", "INPUT.MIN_SIZE_TEST", "64"),
    *("SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", "6", "SOLVER.STEPS", "(4,)"),
    *("SOLVER.CHECKPOINT_PERIOD", "1", "TEST.PRECISE_BN.NUM_ITER", "2"),
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    """A folder with a small VOC set and converted random weights."""
    folder = tmp_path_factory.mktemp("shop")
    rng = np.random.default_rng(0)
    things: dict[str, list[Thing]] = {}
    for number in range(14):
        x, y = (int(value) for value in rng.integers(1, 40, 2))
        things[f"{number:03d}"] = [
            ("cat", (x, y, x + 30, y + 25), 0),
            ("dog", (x + 15, y + 10, x + 50, y + 50), 0),
        ]
    names = list(things)
    write_voc(folder / "voc", {"train": names[:10], "test": names[10:]}, things, size=(96, 100))
    for seed in (0, 1):
        done = tool(
            *("convert", "random", "--arch", "resnet50", "--seed", str(seed)),
            *("--arch-kwargs", "{channels: [8, 16, 32, 64]}"),
            *("--protocol", "detection/shapes_tiny_c4.yaml"),
            *("--output", folder / f"weights{seed}"),
        )
        assert done.returncode == 0, done.stderr
    return folder


def arguments(shop: Path, output: Path, *more: str, weights: int = 0) -> list[str]:
    voc = shop / "voc"
    sets = ["DATASETS.TRAIN", f"('voc:{voc}:train',)", "DATASETS.TEST", f"('voc:{voc}:test',)"]
    config = str(shop / f"weights{weights}" / "config.yaml")
    flags = [word for word in more if word.startswith("--")]
    rest = [word for word in more if not word.startswith("--")]
    return ["--config-file", config, *flags, *SMALL, *sets, "OUTPUT_DIR", str(output), *rest]


def in_process(capsys, *words: str) -> tuple[int, str]:
    """For what ends before training: (exit code, errors), without waiting for a new process."""
    code = main(words)
    return code, capsys.readouterr().err


def train_net(shop: Path, output: Path, *more: str, **options):
    return tool("train_net", *arguments(shop, output, *more, **options))


@pytest.fixture(scope="module")
def finished(shop, tmp_path_factory) -> Path:
    """A run to its end, undisturbed."""
    output = tmp_path_factory.mktemp("finished") / "run"
    done = train_net(shop, output)
    assert done.returncode == 0, done.stderr
    assert "(1 trial, voc07-11pt)" in done.stdout
    return output


def test_a_run_ends_in_a_record_that_can_be_traced(finished, shop):
    record = read_record(finished / "record.json")
    certificate = json.loads((shop / "weights0" / "certificate.json").read_text())
    assert record["kind"] == "detection"
    assert record["protocol"]["id"] == "shapes-tiny-c4"
    assert {"AP", "AP50", "AP75", "coco-101pt/AP"} <= set(record["metrics"])
    assert record["inputs"]["weights"] == certificate["weights_sha256"]
    assert record["details"]["backbone"]["method"] == "random"
    assert set(record["details"]["per_class"]) == {"cat", "dog"}


def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(finished, shop, tmp_path):
    output = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "tools/train_net.py"]
    command += [*arguments(shop, output, "--auto-resume")]
    for kill_after in ("model_0000001.pth", "model_0000003.pth"):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not (output / kill_after).exists() and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (output / "record.json").exists()
    done = train_net(shop, output, "--auto-resume")
    assert done.returncode == 0, done.stderr
    ours, undisturbed = (read_record(folder / "record.json") for folder in (output, finished))
    assert ours["metrics"] == undisturbed["metrics"]
    for name in ("boxes", "scores", "category"):
        with np.load(output / "detections.npz") as a, np.load(finished / "detections.npz") as b:
            assert np.array_equal(a[name], b[name])
    iterations = [json.loads(line)["iteration"] for line in (output / "metrics.json").open()]
    assert iterations
    assert iterations == sorted(set(iterations))


def test_trials_have_seeds_and_folders_of_their_own_and_finished_ones_are_kept(shop, tmp_path):
    output = tmp_path / "run"
    assert train_net(shop, output, "--trials=1").returncode == 0
    first = (output / "seed0" / "record.json").read_bytes()
    done = train_net(shop, output, "--trials=2", "--resume")
    assert done.returncode == 0, done.stderr
    assert "seed0: finished before, kept" in done.stdout
    assert "(2 trials" in done.stdout
    assert (output / "seed0" / "record.json").read_bytes() == first
    records = [read_record(output / f"seed{seed}" / "record.json") for seed in (0, 1)]
    assert [record["seed"] for record in records] == [0, 1]
    assert records[0]["protocol"]["hash"] == records[1]["protocol"]["hash"]
    losses = [(output / f"seed{seed}" / "metrics.json").read_text() for seed in (0, 1)]
    assert losses[0] != losses[1]


def test_two_processes_on_the_cpu_train_and_score(shop, tmp_path):
    done = train_net(shop, tmp_path / "run", "--num-gpus=2", "MODEL.RESNETS.NORM", "naiveSyncBN")
    assert done.returncode == 0, done.stderr
    assert read_record(tmp_path / "run" / "record.json")["details"]["processes"] == 2


def test_a_protocol_for_more_processes_is_scaled_and_says_so(shop, tmp_path):
    done = train_net(
        shop, tmp_path / "run", "SOLVER.REFERENCE_WORLD_SIZE", "2", "SOLVER.IMS_PER_BATCH", "4",
        "SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "batch 4 → 2, learning rate 0.03 → 0.015, iterations 2 → 4" in done.stdout
    record = read_record(tmp_path / "run" / "record.json")
    assert record["details"]["scaled_from_processes"] == 2


def test_a_finished_detector_is_scored_again_to_the_same_numbers(finished, shop, tmp_path):
    weights = str(finished / "model_final.pth")
    done = train_net(shop, tmp_path / "again", "--eval-only", "MODEL.WEIGHTS", weights)
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "again" / "scores.json").read_text())
    assert scores["voc07-11pt"]["AP"] == read_record(finished / "record.json")["metrics"]["AP"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["MODEL.WEIGHTS", ""], "KSCL.FROM_SCRATCH True"),
        (["MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"], "MODEL.PIXEL_STD is [1.0, 1.0, 1.0]"),
        (["MODEL.RESNETS.STRIDE_IN_1X1", "True"], "STRIDE_IN_1X1"),
        (["MODEL.ROI_HEADS.NUM_CLASSES", "3"], "NUM_CLASSES"),
        (["INPUT.FORMAT", "BGR"], "INPUT.FORMAT"),
        (["DATASETS.TEST", "('voc:nowhere:test',)"], "nowhere"),
        (["SOLVER.MAX_ITR", "3"], "SOLVER.MAX_ITER"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(shop, tmp_path, capsys, more, reason):
    code, told = in_process(capsys, *arguments(shop, tmp_path / "run", *more))
    assert code == 2
    assert reason in told
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_refused(finished, shop, capsys):
    before = (finished / "record.json").read_bytes()
    for more, weights, reason in (
        ((), 0, "holds this run already"),
        (("--auto-resume",), 1, "other weights"),
        (("--auto-resume", "SOLVER.BASE_LR", "0.5"), 0, "other settings"),
    ):
        words = arguments(shop, finished, *more, weights=weights)
        code, told = in_process(capsys, *words)
        assert code == 2
        assert reason in told
    assert (finished / "record.json").read_bytes() == before


def test_training_from_scratch_runs_when_it_is_asked_for_by_name(shop, tmp_path):
    more = ["MODEL.WEIGHTS", "", "KSCL.FROM_SCRATCH", "True", "SOLVER.MAX_ITER", "2"]
    done = train_net(shop, tmp_path / "run", *more, "SOLVER.STEPS", "(1,)")
    assert done.returncode == 0, done.stderr
    assert read_record(tmp_path / "run" / "record.json")["details"]["backbone"] == {
        "method": "from scratch"
    }


def test_a_loss_that_is_no_number_stops_with_advice(shop, tmp_path):
    done = train_net(shop, tmp_path / "run", "SOLVER.BASE_LR", "1e9", "SOLVER.WARMUP_ITERS", "0")
    assert done.returncode == 2
    assert "lower SOLVER.BASE_LR" in done.stderr


def test_the_printed_config_can_be_fed_back(shop, tmp_path, capsys):
    assert main(arguments(shop, tmp_path / "run", "--print-config")) == 0
    printed = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(printed)
    assert main(["--config-file", str(tmp_path / "config.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
