"""A run resumes on another number of processes only if asked to, and sees the same images."""

from __future__ import annotations

import json
import os

import pytest

from kscl.engine.metrics_log import METRICS_FILE
from kscl.records.record import read_record
from tests.helpers.runs import Run

pytestmark = pytest.mark.full

STEPS, STOPPED_AFTER = 12, 6
# Without BatchNorm the number of processes changes nothing but rounding.
WORDS = [
    *("BACKBONE.NAME", "test_efficientnet_gn", "BACKBONE.KWARGS.drop_path_rate", 0),
    *("SOLVER.EPOCHS", 2, "LOG.PERIOD", 1),
]


def end_after_the_checkpoint():
    from kscl.run.engine import Run

    save = Run.save

    def save_and_end(self, step):
        save(self, step)
        if step == STOPPED_AFTER:
            os._exit(9)

    Run.save = save_and_end


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, images):
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", images, *WORDS)
    run.finish()
    return run


def losses_in(run):
    return [json.loads(line)["loss"] for line in (run.folder / METRICS_FILE).open()]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_must_be_asked_for_and_continues_the_same_run(
    tmp_path, images, undisturbed, before, after
):
    run = Run(tmp_path / "run", images, *WORDS, ranks=before)
    for process in run.start(before=end_after_the_checkpoint):
        process.join(120)
    run.ranks = after
    refused = run.start("--resume")
    for process in refused:
        process.join(120)
    assert [process.exitcode for process in refused] == [2] * after
    told = run.log.read_text()
    assert f"world_size: {before} before, {after} now" in told
    assert "--allow-world-size-change" in told
    assert "BatchNorm" in told
    run.finish("--resume", "--allow-world-size-change")
    assert len(losses_in(run)) == STEPS
    assert losses_in(run) == pytest.approx(losses_in(undisturbed), rel=1e-4)
    details = read_record(run.folder / "record.json")["details"]
    assert details["world_sizes"] == [[0, before], [STOPPED_AFTER, after]]
    assert details["processes"] == after
    run.ranks = before
    run.finish("--resume")  # a finished run is left as it is, whoever asks
