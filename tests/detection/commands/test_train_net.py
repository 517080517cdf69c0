"""Fine-tuning as a user runs it: refused before it starts if anything is wrong, exact on resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from detection.commands.convert import main as convert
from detection.commands.score import main as score
from detection.commands.train_net import main
from detection.config import load_detection_config
from detection.data.sets import RunSets
from detection.scoring.boxes import Detections
from detection.scoring.resample import DRAWS
from detection.train.detect import Detection
from detection.train.trials import summary
from kscl.benchmark.leaderboard.exports import as_csv
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import markdown
from kscl.data.annotated.voc import read_voc
from kscl.data.annotations import AnnotatedSet
from kscl.data.masks import run_lengths
from kscl.records.record import read_record
from kscl.run.task import Inputs
from tests.detection.commands.conftest import READS
from tests.helpers.detection_runs import TrainNet, arguments, start_train_net

SIZES = ("APs", "APm")  # no object of the set is large
SHORT = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "KSCL.SCORER", "coco-101pt")


def in_process(capsys, *words: str) -> tuple[int, str]:
    """For what ends before training: (exit code, errors), without waiting for a new process."""
    code = main(words)
    return code, capsys.readouterr().err


def train_net(shop: Path, output: Path, *more: str, **options) -> TrainNet:
    return start_train_net(shop, output, *more, **options).wait()


@pytest.mark.smoke
def test_a_run_ends_in_a_record_that_can_be_traced(finished, shop):
    record = read_record(finished / "record.json")
    certificate = json.loads((shop / "weights0" / "certificate.json").read_text())
    assert record["kind"] == "detection"
    assert record["protocol"]["id"] == "shapes-tiny-c4+DATASETS=voc (changed)"
    assert {"AP", "AP50", "AP75"} <= set(record["metrics"])
    others = {f"coco-101pt/{name}" for name in ("AP", *SIZES, "AR1", "AR10", "AR100")}
    assert others | {"voc10-every-point/AP"} <= set(record["metrics"])
    assert record["inputs"]["weights"] == certificate["weights_sha256"]
    assert record["details"]["backbone"]["method"] == "random"
    assert set(record["details"]["per_class"]) == {"cat", "dog"}
    assert 2 <= len(record["details"]["resampled_AP"]) <= DRAWS


def test_nobody_is_warned_of_what_detectron2_asks_of_torch(finished):
    assert "meshgrid" not in (finished.parent / f"{finished.name}.stderr").read_text()


def test_a_class_that_is_hardly_found_is_told_at_the_end_and_on_the_board(finished, tmp_path):
    scores = json.loads((finished / "scores.json").read_text())
    data = read_record(finished / "record.json")["data"]
    for seed, (found, missed) in enumerate([(80.0, 0.3), (70.0, 0.9)]):
        for result in scores.values():
            result["AP50"] = (found + missed) / 2
            result["per_class"]["cat"]["AP50"] = found
            result["per_class"]["dog"]["AP50"] = missed
        words = ["OUTPUT_DIR", str(tmp_path / f"seed{seed}"), "SEED", str(seed)]
        cfg = load_detection_config(finished / "config.yaml", words)
        task = Detection(cfg, RunSets(("cat", "dog"), [], None, data))
        task.inputs = Inputs(data)
        task.write_record(scores, "", [[0, 1]], 1.0, 1.0, {})
    folders = [tmp_path / f"seed{seed}" for seed in (0, 1)]
    end, *told = summary(folders).splitlines()
    assert end.endswith("(2 trials, voc07-11pt)")
    (warning,) = told  # the same for both seeds
    assert warning.startswith("Warning: The class 'dog' is hardly ever found")
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    assert markdown(board, "x").count("The class 'dog' is hardly ever found (AP50") == 1
    assert "'cat'" not in markdown(board, "x")


def test_a_record_has_the_label_and_says_that_its_detector_is_too_low(shop, tmp_path):
    words = ["KSCL.LABEL", "narrow", *SHORT]
    words += ["MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.9999"]  # so that nothing is found
    done = train_net(shop, tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    details = read_record(tmp_path / "run/record.json")["details"]
    assert details["backbone"]["method"] == "narrow"
    (warning,) = details["warnings"]
    assert warning.startswith("AP50 is 0.0, too low to compare.")
    assert f"Warning: {warning}" in done.stdout
    board = build_board([tmp_path], check_stale=False, with_reported=False)
    (row,) = board.rows
    assert row.entry.method == "narrow"
    assert not row.is_pretrained


def test_every_annotated_set_is_read_once(finished):
    assert sorted((finished.parent / READS).read_text().split()) == ["test", "train"]


def test_a_changed_detector_is_not_scored(finished, shop, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "changed")
    path = tmp_path / "changed" / "model_final.pth"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    more = ["--eval-only", "MODEL.WEIGHTS", str(path)]
    code, told = in_process(capsys, *arguments(shop, tmp_path / "again", *more))
    assert code == 2
    assert f"{path} does not match its checksum" in told


def test_a_leaderboard_sees_that_the_data_have_changed(finished, shop):
    (row,) = build_board([finished]).rows
    assert row.stale == []
    extra = shop / "voc" / "Annotations" / "extra.xml"
    extra.write_text("<annotation/>")
    try:
        (row,) = build_board([finished]).rows
    finally:
        extra.unlink()
    assert [reason.split(" was ")[0] for reason in row.stale] == ["The test data", "The train data"]


def test_trials_have_seeds_and_folders_of_their_own_and_finished_ones_are_kept(shop, tmp_path):
    output = tmp_path / "run"
    assert train_net(shop, output, "--num-trials=1", *SHORT).returncode == 0
    first = (output / "seed0" / "record.json").read_bytes()
    done = train_net(shop, output, "--num-trials=2", "--resume", *SHORT)
    assert done.returncode == 0, done.stderr
    assert f"This run has ended: {output / 'seed0'}" in done.stderr
    assert "(2 trials" in done.stdout
    assert (output / "seed0" / "record.json").read_bytes() == first
    records = [read_record(output / f"seed{seed}" / "record.json") for seed in (0, 1)]
    assert [record["seed"] for record in records] == [0, 1]
    assert records[0]["protocol"]["hash"] == records[1]["protocol"]["hash"]
    assert records[0]["details"]["detector_sha256"] != records[1]["details"]["detector_sha256"]


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
        (["SOLVER.REFERENCE_WORLD_SIZE", "8"], "SOLVER.REFERENCE_WORLD_SIZE 0"),
        (["--num-gpus=2", "MODEL.RESNETS.NORM", "SyncBN"], "naiveSyncBN"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(shop, tmp_path, capsys, more, reason):
    code, told = in_process(capsys, *arguments(shop, tmp_path / "run", *more))
    assert code == 2
    assert reason in told
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_refused(finished, shop, tmp_path, capsys):
    before = (finished / "record.json").read_bytes()
    other_test = ("DATASETS.TEST", f"('voc:{shop / 'voc'}:val',)")
    detector = ("MODEL.WEIGHTS", str(finished / "model_final.pth"))
    other = tmp_path / "model_final.pth"
    other.touch()
    for more, weights, reason in (
        ((), 0, "Resume it with --resume, or choose another"),
        (("--auto-resume",), 1, "MODEL.WEIGHTS "),
        (("--auto-resume", "SOLVER.BASE_LR", "0.5"), 0, "SOLVER.BASE_LR: 0.03 before, 0.5 now"),
        (("--auto-resume", *other_test), 0, "DATASETS.TEST "),
        (("--eval-only", "MODEL.WEIGHTS", str(other)), 0, "would be overwritten"),
        (("--eval-only", "--num-trials=2", *detector), 0, "Leave --num-trials out"),
    ):
        words = arguments(shop, finished, *more, weights=weights)
        code, told = in_process(capsys, *words)
        assert code == 2
        assert reason in told
    assert (finished / "record.json").read_bytes() == before


def test_coco_files_train_and_score_like_voc_folders_and_from_scratch_if_asked(shop, tmp_path):
    sets = []
    for role, split in (("TRAIN", "train"), ("TEST", "test")):
        path = tmp_path / f"{split}.json"
        path.write_text(json.dumps(as_coco(read_voc(shop / "voc", split).checked())))
        sets += [f"DATASETS.{role}", f"('coco:{path}:{shop / 'voc' / 'JPEGImages'}',)"]
    more = [*sets, *SHORT, "MODEL.WEIGHTS", "", "KSCL.FROM_SCRATCH", "True"]
    done = train_net(shop, tmp_path / "run", *more)
    assert done.returncode == 0, done.stderr
    assert "(1 trial, coco-101pt)" in done.stdout
    record = read_record(tmp_path / "run" / "record.json")
    assert {"AP", "voc07-11pt/AP", "voc10-every-point/AP"} <= set(record["metrics"])
    assert {*SIZES, "AR1", "AR10", "AR100"} <= set(record["metrics"])
    assert len(record["data"]["test"]["parts"]) == 2  # the images and the file
    backbone = record["details"]["backbone"]
    assert backbone["method"] == "from scratch"
    assert backbone["arch"].startswith("resnet")
    assert "res2_out_channels" in backbone["kwargs"]


def as_coco(annotated: AnnotatedSet) -> dict:
    images, annotations = [], []
    for number, image in enumerate(annotated.images):
        assert image.path is not None
        size = {"width": image.width, "height": image.height}
        images.append({"id": number, "file_name": image.path.name, **size})
        for thing in image.objects:
            x1, y1, x2, y2 = thing.box
            about = {"id": len(annotations) + 1, "image_id": number, "iscrowd": 0}
            category = annotated.class_names.index(thing.name) + 1
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            annotations.append({**about, **box, "category_id": category})
    categories = [{"id": i, "name": name} for i, name in enumerate(annotated.class_names, 1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def test_a_loss_that_is_not_a_number_stops_with_advice(shop, tmp_path, capsys):
    words = ["SOLVER.BASE_LR", "1e9", "SOLVER.WARMUP_ITERS", "0"]
    code, told = in_process(capsys, *arguments(shop, tmp_path / "run", *words))
    assert code == 2
    assert "SOLVER.BASE_LR" in told


def test_the_printed_config_can_be_fed_back(shop, tmp_path, capsys):
    assert main(arguments(shop, tmp_path / "run", "--print-config")) == 0
    printed = capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(printed)
    assert main(["--config-file", str(tmp_path / "config.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.fixture(scope="module")
def mask_shop(shop, tmp_path_factory):
    """The shop's images, and random weights that are converted for a mask head."""
    folder = tmp_path_factory.mktemp("masks")
    (folder / "voc").symlink_to(shop / "voc")
    words = ["random", "--arch", "resnet50", "--arch-kwargs", "{channels: [8, 16, 32, 64]}"]
    words += ["--protocol", "detection/shapes_tiny_mask.yaml"]
    assert convert([*words, "--output-dir", str(folder / "weights0")]) == 0
    return folder


def sets_with_masks(shop, folder):
    """Return the words that name COCO files; every object has a polygon, the last is a crowd."""
    words = []
    for role, split in (("TRAIN", "train"), ("TEST", "test")):
        content = as_coco(read_voc(shop / "voc", split).checked())
        for thing in content["annotations"]:
            x, y, w, h = thing["bbox"]
            thing["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        pixels = np.zeros((100, 96), bool)
        pixels[int(y) : int(y + h), int(x) : int(x + w)] = True
        counts = run_lengths(pixels).counts.tolist()
        thing |= {"iscrowd": 1, "segmentation": {"size": [100, 96], "counts": counts}}
        path = folder / f"{split}.json"
        path.write_text(json.dumps(content))
        words += [f"DATASETS.{role}", f"('coco:{path}:{shop / 'voc' / 'JPEGImages'}',)"]
    return words


def test_masks_are_trained_scored_recorded_and_shown(mask_shop, tmp_path, capsys):
    sets = sets_with_masks(mask_shop, tmp_path)
    output = tmp_path / "run"
    done = start_train_net(mask_shop, output, *sets, *SHORT).wait()
    assert done.returncode == 0, done.stderr
    assert "mask AP50" in done.stdout
    record = read_record(output / "record.json")
    assert {"mask/AP", "mask/AP50", "mask/AP75", "mask/AR100", "AR1"} <= set(record.metrics)
    classes = record.details["per_class_by_scorer"]["coco-101pt-segm"]
    assert set(classes) == {"cat", "dog"}
    saved = Detections.read(output / "detections.npz")
    assert saved.masks is not None
    assert {tuple(mask["size"]) for mask in saved.masks} <= {(100, 96)}
    for truth in (output / "ground_truth.npz", tmp_path / "test.json"):
        words = ["--detections", str(output / "detections.npz"), "--annotations", str(truth)]
        assert score([*words, "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["coco-101pt-segm"]["AP"] == record.metrics["mask/AP"]
    board = build_board([tmp_path])
    assert "mask AP50" in markdown(board, "Board")
    assert "mask/AP50" in as_csv(board).splitlines()[0]
    # Without masks in a set, nothing starts.
    test = ("DATASETS.TEST", f"('voc:{mask_shop}/voc:test',)")
    assert main(arguments(mask_shop, tmp_path / "other", *sets, *SHORT, *test)) == 2
    assert "[missing mask]" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
