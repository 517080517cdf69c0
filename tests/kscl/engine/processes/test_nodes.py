"""Ranks on several machines, each with a torchrun of its own, train like ranks on one machine."""

from __future__ import annotations

import os
import subprocess

import pytest

from kscl.benchmark.suite.execute import program_path
from kscl.main import python_words
from kscl.records.record import read_record
from tests.helpers.commands import ROOT
from tests.helpers.runs import Run, draw_images, free_port, same_bits

pytestmark = pytest.mark.full


def test_two_machines_with_a_rank_each_end_in_the_bits_of_one_machine_with_two(tmp_path):
    images = draw_images(tmp_path / "images", 48)
    one = Run(tmp_path / "one", images, "SOLVER.EPOCHS", 2, ranks=2)
    two = Run(tmp_path / "two", images, "SOLVER.EPOCHS", 2)
    # As in the batch script of a stage on several machines.
    command = [program_path("torchrun"), "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["--rdzv-id", "7-0", "--no-python", *python_words("pretrain")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with two.log.open("w") as log:
        agents = [
            subprocess.Popen(
                [*command, *two.command()], stdout=log, stderr=log, cwd=ROOT, env=environment
            )
            for _ in range(2)
        ]
    try:
        one.finish()
        codes = [agent.wait(300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0, 0], two.log.read_text()[-2000:]
    assert read_record(two.folder / "record.json")["details"]["processes"] == 2
    for part in ("learner", "optimizer", "step", "window"):
        assert same_bits(two.state()[part], one.state()[part]), part
