"""Whose folder it is, what may change on resume, and who may write to it."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest
from fvcore.common.config import CfgNode

from kscl.config import config_values, save_config
from kscl.errors import KsclError
from kscl.run.checkpoint import CHECKPOINT_FOLDER, save_checkpoint
from kscl.run.engine import Flags, find_start
from kscl.run.task import Task
from kscl.runtime import files as folder_lock
from kscl.runtime.files import only_run_in


def config(folder: Path, **values: object) -> CfgNode:
    sections = {"LR": 0.1, "WEIGHTS": "a.pth", "WORKERS": 2} | values
    return CfgNode({"OUTPUT_DIR": str(folder), "SOLVER": sections})


MOVABLE = ("OUTPUT_DIR", "SOLVER.WEIGHTS")
RESUME, AUTO_RESUME = Flags(resume=True), Flags(auto_resume=True)


def start(cfg: CfgNode, flags: Flags, may_change: tuple[str, ...] = ()) -> object:
    task = Task(cfg)
    task.may_change = may_change
    task.what_ranks_change = "BatchNorm differs."
    return find_start(task, flags)


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder with the config and one checkpoint of a run."""
    folder = tmp_path / "run"
    folder.mkdir()
    cfg = config(folder)
    save_config(cfg, folder)
    content = {"config": config_values(cfg), "world_size": 1, "data": {"train": "abc"}}
    save_checkpoint(folder / CHECKPOINT_FOLDER, 3, content, 1)
    return folder


def test_a_run_resumes_although_a_setting_without_effect_has_changed(run, tmp_path):
    moved = tmp_path / "moved"
    shutil.move(run, moved)
    found = start(config(moved, WEIGHTS="b.pth"), RESUME, MOVABLE)
    assert found is not None
    assert found[0].parent == moved / CHECKPOINT_FOLDER
    assert found[1]["data"] == {"train": "abc"}


def test_a_setting_that_matters_is_refused_by_name(run):
    with pytest.raises(KsclError, match=r"SOLVER.LR: 0.1 before, 0.5 now") as error:
        start(config(run, LR=0.5, WEIGHTS="b.pth"), RESUME, MOVABLE)
    assert "WEIGHTS" not in str(error.value)
    with pytest.raises(KsclError, match=r"SOLVER.WEIGHTS: 'a.pth' before, 'b.pth' now"):
        start(config(run, WEIGHTS="b.pth"), RESUME, ("OUTPUT_DIR",))


def test_another_number_of_processes_is_refused_unless_allowed(run, monkeypatch):
    assert start(config(run), RESUME, MOVABLE) is not None
    monkeypatch.setattr("kscl.run.engine.world_size", lambda: 2)
    with pytest.raises(KsclError, match=r"world_size: 1 before, 2 now") as error:
        start(config(run), RESUME, MOVABLE)
    assert "--allow-world-size-change" in str(error.value)
    assert "BatchNorm differs" in str(error.value)
    allowed = Flags(resume=True, allow_world_size_change=True)
    assert start(config(run), allowed, MOVABLE) is not None


def test_a_finished_run_without_checkpoints_is_still_its_own(run):
    shutil.rmtree(run / CHECKPOINT_FOLDER)
    with pytest.raises(KsclError, match="nothing to resume"):
        start(config(run), RESUME)
    (run / "record.json").write_text("{}")
    assert start(config(run), RESUME) is None


@pytest.mark.parametrize("auto_resume", [False, True])
def test_a_start_that_failed_before_its_first_step_does_not_block_the_corrected_one(
    run, auto_resume
):
    shutil.rmtree(run / CHECKPOINT_FOLDER)
    (run / "log.jsonl").write_text("{}")
    (run / "metrics.jsonl").touch()
    (run / CHECKPOINT_FOLDER).mkdir()
    assert start(config(run, LR=0.5), Flags(auto_resume=auto_resume), MOVABLE) is None
    (run / "metrics.jsonl").write_text('{"step": 1}')  # it has begun after all
    with pytest.raises(KsclError, match=str(run)):
        start(config(run, LR=0.5), Flags(auto_resume=auto_resume), MOVABLE)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{half", "\x00"])
def test_a_damaged_config_is_an_error_that_names_it(run, text):
    shutil.rmtree(run / CHECKPOINT_FOLDER)
    (run / "record.json").write_text("{}")
    (run / "config.yaml").write_text(text)
    with pytest.raises(KsclError, match=r"config.yaml"):
        start(config(run), AUTO_RESUME)


def hold(folder, holds, release):
    with only_run_in(folder):
        holds.set()
        release.wait(60)


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "LOCK_PATIENCE", 0.1)
    context = multiprocessing.get_context("fork")
    holds, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, holds, release))
    other.start()
    assert holds.wait(60)
    with pytest.raises(KsclError, match=str(tmp_path)), only_run_in(tmp_path):
        pass
    release.set()
    other.join()
    with only_run_in(tmp_path):
        pass
