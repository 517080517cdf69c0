"""Fine-tuning on several processes and machines, and protocols made for more of them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from detection.commands.train_net import main
from kscl.records.record import read_record
from tests.detection.commands.test_train_net import train_net
from tests.detection.commands.test_train_net_resume import evaluations_in
from tests.helpers.commands import ROOT, run
from tests.helpers.detection_runs import arguments
from tests.helpers.ranks import joined

pytestmark = pytest.mark.full


def test_two_processes_on_the_cpu_train_and_score(shop, tmp_path):
    more = ["--num-gpus=2", "MODEL.RESNETS.NORM", "naiveSyncBN", "TEST.EVAL_PERIOD", "3"]
    done = train_net(shop, tmp_path / "run", *more)
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run" / "record.json")
    assert record["details"]["processes"] == 2
    assert list(evaluations_in(tmp_path / "run")) == [2]
    assert "processes" not in record["protocol"]["definition"]  # synchronized statistics


def test_two_processes_of_torchrun_run_two_trials_one_after_the_other(shop, tmp_path):
    output = tmp_path / "run"
    short = ["SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "TEST.PRECISE_BN.ENABLED", "False"]
    done = run(
        *(Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node=2"),
        *(ROOT / "tools" / "train_net.py", *arguments(shop, output, "--num-trials=2", *short)),
    )
    assert done.returncode == 0, done.stderr
    for warned in ("broadcast_buffers", "meshgrid"):  # of which torch would warn on every rank
        assert warned not in done.stderr
    records = [read_record(output / f"seed{seed}" / "record.json") for seed in (0, 1)]
    assert [record["details"]["processes"] for record in records] == [2, 2]
    # Each process has its own statistics of a plain BatchNorm.
    assert [record["protocol"]["definition"]["processes"] for record in records] == [[2], [2]]


def test_a_norm_that_needs_gpus_is_refused_on_the_ranks_of_torchrun(
    shop, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = arguments(shop, tmp_path / "run", "MODEL.RESNETS.NORM", "SyncBN")
    assert main(words) == 2
    assert "MODEL.RESNETS.NORM SyncBN needs GPUs" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def meet_as_one_per_machine(_: object) -> int:
    from detectron2.utils import comm

    from detection.train.detect import local_ranks

    for _ in range(2):  # two trials
        with local_ranks():
            assert comm.get_world_size() == 2
            assert (comm.get_local_rank(), comm.get_local_size()) == (0, 1)
    return 0


def test_ranks_on_two_machines_count_from_0_on_each(tmp_path):
    done = joined(meet_as_one_per_machine, tmp_path, LOCAL_WORLD_SIZE="1")
    assert [code for code, _ in done] == [0, 0], done


def test_a_protocol_for_more_processes_is_scaled_and_says_so(shop, tmp_path):
    done = train_net(
        shop, tmp_path / "run", "SOLVER.REFERENCE_WORLD_SIZE", "2", "SOLVER.IMS_PER_BATCH", "4",
        "SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "batch 4 → 2, learning rate 0.03 → 0.015, iterations 2 → 4" in done.stdout
    record = read_record(tmp_path / "run" / "record.json")
    assert record["details"]["scaled_from_processes"] == 2


@pytest.mark.parametrize(
    ("gpus", "batch", "rate", "iterations", "steps", "warm_up"),
    [
        (8, 16, 0.02, 24000, [18000, 22000], 100),
        (16, 32, 0.04, 12000, [9000, 11000], 50),
        (1, 2, 0.0025, 192000, [144000, 176000], 800),
    ],
)
def test_the_moco_protocol_is_scaled_to_the_gpus_there_are_only_on_request(
    gpus, batch, rate, iterations, steps, warm_up, capsys
):
    words = ["--config-file", "detection/voc0712_c4_24k_moco.yaml", "--num-gpus", str(gpus)]
    assert main([*words, "--print-config"]) == 0
    solver = yaml.safe_load(capsys.readouterr().out)["SOLVER"]
    assert (solver["IMS_PER_BATCH"], solver["BASE_LR"], solver["MAX_ITER"]) == (16, 0.02, 24000)
    words += ["--print-config", "SOLVER.REFERENCE_WORLD_SIZE", "8", "TEST.EVAL_PERIOD", "500"]
    assert main(words) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    solver = printed["SOLVER"]
    assert (solver["IMS_PER_BATCH"], solver["BASE_LR"]) == (batch, rate)
    assert (solver["MAX_ITER"], solver["STEPS"]) == (iterations, steps)
    assert solver["WARMUP_ITERS"] == warm_up
    assert (solver["CHECKPOINT_PERIOD"], printed["TEST"]["EVAL_PERIOD"]) == (5000, 500)


@pytest.mark.parametrize("url", ["--dist-url=tcp://10.0.0.1:1234", "--dist-url=auto"])
def test_detectron2s_options_for_several_machines_name_the_command_of_torchrun(url, capsys):
    words = ["--num-gpus", "8", "--num-machines", "2", "--machine-rank=1", url]
    words += ["--config-file", "x.yaml", "--resume", "DATASETS.TEST", "('voc:a b:test',)"]
    assert main(words) == 2
    command = capsys.readouterr().err.splitlines()[-1].strip()
    host, port = ("10.0.0.1", "1234") if "10" in url else ("HOST_OF_MACHINE_0", "29500")
    assert shlex.split(command) == [
        *("torchrun", "--nnodes=2", "--node-rank=1", "--nproc-per-node=8"),
        *(f"--master-addr={host}", f"--master-port={port}", "-m", "kscl", "train-net"),
        *("--config-file", "x.yaml", "--resume", "DATASETS.TEST", "('voc:a b:test',)"),
    ]
    # On one machine they change nothing.
    one = ["--num-machines", "1", "--machine-rank", "0", "--dist-url", "auto", "--print-config"]
    assert main(["--config-file", "detection/voc0712_c4_24k_moco.yaml", *one]) == 0


def test_a_finished_detector_is_scored_again_to_the_same_numbers(finished, shop, tmp_path):
    weights = str(finished / "model_final.pth")
    more = ["--eval-only", "--num-gpus=2", "MODEL.WEIGHTS", weights]
    done = train_net(shop, tmp_path / "again", *more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("coco-101pt") == 1
    passes = [np.load(folder / "detections.npz") for folder in (finished, tmp_path / "again")]
    assert len(passes[0]["scores"]) > 0
    np.testing.assert_allclose(passes[0]["scores"], passes[1]["scores"], atol=1e-4)
    scores = json.loads((tmp_path / "again" / "scores.json").read_text())
    assert scores["voc07-11pt"]["AP"] == read_record(finished / "record.json")["metrics"]["AP"]
