"""A run is resumed and scored as what it was made of, and into a folder that is free for it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from detection.commands.convert import main as convert
from detection.commands.train_net import main
from kscl.backbone_file import read_plain
from kscl.data.annotated.voc import read_voc
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, find_checkpoints, save_checkpoint
from tests.detection.commands.test_train_net import as_coco
from tests.helpers.detection_runs import arguments, start_train_net

SHORT = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)")


def write_coco(shop: Path, folder: Path, turned: bool = False) -> list[str]:
    """Write the shop's sets as COCO files; `turned` gives the classes each other's ids."""
    words = []
    for role, split in (("TRAIN", "train"), ("TEST", "test")):
        content = as_coco(read_voc(shop / "voc", split).checked())
        for entry in content["categories"] if turned else ():
            entry["id"] = 3 - entry["id"]
        for entry in content["annotations"] if turned else ():
            entry["category_id"] = 3 - entry["category_id"]
        path = folder / f"{split}.json"
        path.write_text(json.dumps(content))
        words += [f"DATASETS.{role}", f"('coco:{path}:{shop / 'voc' / 'JPEGImages'}',)"]
    return words


def test_classes_in_another_order_are_neither_resumed_nor_scored(shop, tmp_path, capsys):
    output = tmp_path / "run"
    words = [*SHORT, *write_coco(shop, tmp_path)]
    done = start_train_net(shop, output, *words).wait()
    assert done.returncode == 0, done.stderr
    write_coco(shop, tmp_path, turned=True)
    told = "classes: ['cat', 'dog'] {}, ['dog', 'cat'] now"
    assert main(arguments(shop, output, "--resume", *words)) == 2
    assert told.format("before") in capsys.readouterr().err
    score = ["--eval-only", *words, "MODEL.WEIGHTS", str(output / "model_final.pth")]
    assert main(arguments(shop, tmp_path / "again", *score)) == 2
    error = capsys.readouterr().err
    assert told.format("in training") in error
    assert "KSCL.CLASS_NAMES" in error
    (output / "record.json").unlink()  # so that the checkpoint is what is resumed
    assert main(arguments(shop, output, "--resume", *words)) == 2
    assert told.format("before") in capsys.readouterr().err


@pytest.fixture
def unfinished(finished, tmp_path) -> Path:
    """A run that ended after its last checkpoint, before its record."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "record.json").unlink()
    return folder


def rewrite(run: Path, change) -> None:
    """Replace the checkpoints by one whose content is changed, with a fitting checksum."""
    folder = run / CHECKPOINT_FOLDER
    newest, *others = find_checkpoints(folder)
    content = read_plain(newest)
    change(content)
    for path in (newest, *others):
        path.unlink()
    save_checkpoint(folder, 6, content, 1)


def test_a_checkpoint_from_before_classes_were_saved_is_resumed(shop, unfinished):
    rewrite(unfinished, lambda content: content.pop("classes"))
    done = start_train_net(shop, unfinished, "--resume").wait()
    assert done.returncode == 0, done.stderr
    assert (unfinished / "record.json").is_file()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("INPUT.FORMAT", "BGR", "INPUT.FORMAT: 'RGB' in training, 'BGR' now"),
        ("MODEL.PIXEL_MEAN", "[0.0, 0.0, 0.0]", "MODEL.PIXEL_MEAN: [123."),
        ("MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]", "MODEL.PIXEL_STD: [58."),
        ("KSCL.CLASS_NAMES", "['dog', 'cat']", "classes: ['cat', 'dog'] in training"),
    ],
)
def test_a_detector_is_scored_only_on_the_input_it_was_trained_on(
    finished, shop, tmp_path, capsys, key, value, told
):
    words = ["--eval-only", "MODEL.WEIGHTS", str(finished / "model_final.pth"), key, value]
    assert main(arguments(shop, tmp_path / "again", *words)) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Use the config.yaml of its run" in error
    assert not (tmp_path / "again").exists()


def test_a_scaled_protocol_resumes_on_no_other_number_of_processes_and_says_why(
    shop, unfinished, capsys
):
    def as_on_two(content: dict) -> None:
        content["config"]["SOLVER"]["REFERENCE_WORLD_SIZE"] = 2
        content["world_size"] = 2

    rewrite(unfinished, as_on_two)
    for flags in (["--resume"], ["--resume", "--allow-world-size-change"]):
        words = arguments(shop, unfinished, *flags, "SOLVER.REFERENCE_WORLD_SIZE", "2")
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "SOLVER.IMS_PER_BATCH: 2 before, 1 now" in told
        assert "SOLVER.BASE_LR: 0.03 before, 0.015 now" in told
        assert "are scaled to the number of processes" in told
        assert "resumes on as many as it began with" in told
        assert "the record says so" not in told


def test_a_folder_that_is_not_free_is_refused_before_anything_is_read(
    finished, shop, tmp_path, capsys
):
    (tmp_path / "output" / "kscl").mkdir(parents=True)
    nowhere = ("DATASETS.TRAIN", "('voc:nowhere:train',)", "MODEL.WEIGHTS", "nowhere.pth")
    for folder, reason in (
        (tmp_path / "output", "is not empty and does not hold a run"),
        (finished, "holds a run already. Resume it with --resume"),
    ):
        assert main(arguments(shop, folder, *nowhere)) == 2
        told = capsys.readouterr().err
        assert f"OUTPUT_DIR {folder} {reason}" in told
        assert "nowhere" not in told


def test_the_next_command_of_the_converter_has_a_folder_of_its_own(tmp_path, capsys):
    folders = []
    for name in ("one", "two"):
        words = ["random", "--arch", "resnet50", "--arch-kwargs", "{channels: [8, 16, 32, 64]}"]
        words += ["--protocol", "detection/shapes_tiny_c4.yaml"]
        assert convert([*words, "--output-dir", str(tmp_path / name)]) == 0
        (told,) = re.findall(r"Next: python tools/train_net\.py (.*)", capsys.readouterr().out)
        config, path, *overrides = shlex.split(told)
        assert main([config, path, "--print-config", *overrides]) == 0
        folders += re.findall(r"^OUTPUT_DIR: (.*)", capsys.readouterr().out, flags=re.M)
    assert folders == [str(tmp_path / "one-run"), str(tmp_path / "two-run")]
