"""Whose folder it is, what may change on resume, and who may write to it."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest
from fvcore.common.config import CfgNode

from kscl.config.tree import config_values, save_config
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, save_checkpoint
from kscl.engine.run_dir import find_start
from kscl.errors import KsclError
from kscl.runtime import folder_lock
from kscl.runtime.folder_lock import only_run_in


def config(folder: Path, **values: object) -> CfgNode:
    sections = {"LR": 0.1, "WEIGHTS": "a.pth", "WORKERS": 2} | values
    return CfgNode({"OUTPUT_DIR": str(folder), "SOLVER": sections})


MOVABLE = ("OUTPUT_DIR", "SOLVER.WEIGHTS")


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
    found = find_start(config(moved, WEIGHTS="b.pth"), True, False, MOVABLE)
    assert found is not None
    assert found[0].parent == moved / CHECKPOINT_FOLDER
    assert found[1]["data"] == {"train": "abc"}


def test_a_setting_that_matters_is_refused_by_name(run):
    with pytest.raises(KsclError, match=r"SOLVER.LR: 0.1 before, 0.5 now") as error:
        find_start(config(run, LR=0.5, WEIGHTS="b.pth"), True, False, MOVABLE)
    assert "WEIGHTS" not in str(error.value)
    with pytest.raises(KsclError, match=r"SOLVER.WEIGHTS: 'a.pth' before, 'b.pth' now"):
        find_start(config(run, WEIGHTS="b.pth"), True, False, ("OUTPUT_DIR",))


def test_what_else_must_be_the_same_is_refused_by_name_with_its_hint(run):
    also = {"world_size": 1, "data": {"train": "abc"}}
    assert find_start(config(run), True, False, MOVABLE, also) is not None
    hints = {"world_size": "Use --allow.", "data": "Not this."}
    with pytest.raises(KsclError, match=r"world_size: 1 before, 2 now(?s:.)*Use --allow") as error:
        find_start(config(run), True, False, MOVABLE, {**also, "world_size": 2}, hints)
    assert "Not this" not in str(error.value)
    with pytest.raises(KsclError, match=r"data.train: 'abc' before, 'def' now"):
        find_start(config(run), True, False, MOVABLE, {**also, "data": {"train": "def"}})


def test_a_finished_run_without_checkpoints_is_still_its_own(run):
    shutil.rmtree(run / CHECKPOINT_FOLDER)
    with pytest.raises(KsclError, match="nothing to resume"):
        find_start(config(run), True, False)
    (run / "record.json").write_text("{}")
    assert find_start(config(run), True, False) is None


@pytest.mark.parametrize("auto_resume", [False, True])
def test_a_start_that_failed_before_its_first_step_does_not_block_the_corrected_one(
    run, auto_resume
):
    shutil.rmtree(run / CHECKPOINT_FOLDER)
    (run / "log.jsonl").write_text("{}")
    (run / "metrics.jsonl").touch()
    (run / CHECKPOINT_FOLDER).mkdir()
    assert find_start(config(run, LR=0.5), False, auto_resume, MOVABLE) is None
    (run / "metrics.jsonl").write_text('{"step": 1}')  # it has begun after all
    with pytest.raises(KsclError, match=str(run)):
        find_start(config(run, LR=0.5), False, auto_resume, MOVABLE)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{half", "\x00"])
def test_a_damaged_config_is_an_error_that_names_it(run, text):
    shutil.rmtree(run / CHECKPOINT_FOLDER)
    (run / "record.json").write_text("{}")
    (run / "config.yaml").write_text(text)
    with pytest.raises(KsclError, match=r"config.yaml"):
        find_start(config(run), False, True)


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
