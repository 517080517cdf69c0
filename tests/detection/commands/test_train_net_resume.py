"""A stopped, killed or damaged run ends in the same bits; one of other inputs is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from detection.commands.convert import main as convert
from detection.commands.train_net import main
from kscl.backbone_file import read_plain
from kscl.data.annotated.voc import read_voc
from kscl.records.record import read_record
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints, save_checkpoint, step_of
from tests.detection.commands.test_train_net import as_coco
from tests.helpers.detection_runs import arguments, start_train_net
from tests.helpers.runs import same_bits, wait_until

pytestmark = pytest.mark.full

STOP_AT = 2  # the iteration in which a signal comes
SHORT = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)")


def assert_same_run(output: Path, undisturbed: Path) -> None:
    ours, theirs = (read_plain(folder / "model_final.pth") for folder in (output, undisturbed))
    assert same_bits(ours, theirs)
    records = [read_record(folder / "record.json") for folder in (output, undisturbed)]
    assert records[0]["metrics"] == records[1]["metrics"]
    with np.load(output / "detections.npz") as a, np.load(undisturbed / "detections.npz") as b:
        assert {"boxes", "scores", "category"} <= set(a.files)
        assert all(np.array_equal(a[name], b[name]) for name in a.files)


def steps_in(output: Path) -> list[int]:
    return [step_of(path) for path in find_checkpoints(output / CHECKPOINT_FOLDER)]


def at_iteration(number: int, act) -> None:
    """Act in the middle of the given iteration of this process."""
    from detectron2.engine import SimpleTrainer

    run_step = SimpleTrainer.run_step

    def act_and_run(self):
        if self.iter == number:
            act()
        run_step(self)

    SimpleTrainer.run_step = act_and_run


def signal_group(number: int) -> None:
    os.killpg(0, number)


def signal_in_training(number: int) -> None:
    at_iteration(STOP_AT, lambda: signal_group(number))


def signal_before(kind: type, method: str, number: int) -> None:
    original = getattr(kind, method)

    def signal_and_call(self):
        signal_group(number)
        original(self)

    setattr(kind, method, signal_and_call)


def signal_in_exact_statistics(number: int) -> None:
    from detectron2.engine.hooks import PreciseBN

    signal_before(PreciseBN, "update_stats", number)


def signal_in_evaluation(number: int) -> None:
    from detection.scoring.evaluator import SavedPassEvaluator

    signal_before(SavedPassEvaluator, "reset", number)


@pytest.mark.parametrize(
    ("moment", "number", "saved", "workers"),
    [
        (signal_in_training, signal.SIGINT, STOP_AT + 1, "2"),
        (signal_in_exact_statistics, signal.SIGTERM, 5, "0"),
        (signal_in_evaluation, signal.SIGTERM, 6, "1"),
    ],
)
def test_a_signal_to_stop_saves_within_an_iteration_and_the_run_resumes_to_the_bit(
    finished, shop, tmp_path, moment, number, saved, workers
):
    output = tmp_path / "run"
    more = ["SOLVER.CHECKPOINT_PERIOD", "99", "DATALOADER.NUM_WORKERS", workers]
    done = start_train_net(shop, output, *more, before=moment, told=[number]).wait()
    assert done.returncode == 128 + number, done.stderr
    assert steps_in(output)[0] == saved
    assert not (output / "record.json").exists()
    done = start_train_net(shop, output, "--resume", *more).wait()
    assert done.returncode == 0, done.stderr
    assert_same_run(output, finished)


def evaluations_in(output: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "metrics.json").open()]
    return {line["iteration"]: line["bbox/AP50"] for line in lines if "bbox/AP50" in line}


@pytest.mark.portable
def test_an_evaluation_on_the_way_changes_nothing_in_the_training_even_if_stopped(
    finished, shop, tmp_path
):
    output = tmp_path / "run"
    more = ["TEST.EVAL_PERIOD", "2", "SOLVER.CHECKPOINT_PERIOD", "99"]
    told = [signal.SIGTERM]
    stopped = start_train_net(shop, output, *more, before=signal_in_evaluation, told=told).wait()
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert steps_in(output) == [1]  # the iteration that ends in the evaluation is made again
    assert not (output / "detections.npz").exists()
    done = start_train_net(shop, output, "--resume", *more).wait()
    assert done.returncode == 0, done.stderr
    assert_same_run(output, finished)
    # After 2 and 4 iterations; the end is scored once.
    assert list(evaluations_in(output)) == [1, 3]
    record, other = (read_record(run / "record.json") for run in (output, finished))
    assert record["protocol"] == other["protocol"]
    in_evaluations = read_plain(newest_of(output))["seconds_of_evaluations"]
    assert in_evaluations > 0
    assert record["details"]["seconds_of_training"] < record["seconds"] - in_evaluations
    saved = [read_plain(newest_of(run)) for run in (output, finished)]
    assert same_bits(saved[0]["model"], saved[1]["model"])
    assert same_bits(saved[0]["trainer"]["optimizer"], saved[1]["trainer"]["optimizer"])


def test_a_retinanet_is_trained_to_the_same_bits_whatever_the_process_did_before(shop, tmp_path):
    """Its compiled loss changed with the calls before, and an evaluation moved its normalizer."""
    words = ["random", "--arch", "resnet50", "--arch-kwargs", "{channels: [8, 16, 32, 64]}"]
    words += ["--protocol", "detection/shapes_tiny_retinanet.yaml", "--force"]
    assert convert([*words, "--output-dir", str(shop / "weights-retina")]) == 0
    more = ["MODEL.RETINANET.NUM_CLASSES", "2", "TEST.PRECISE_BN.NUM_ITER", "1"]
    more += ["INPUT.MIN_SIZE_TRAIN", "(128,)", "INPUT.MIN_SIZE_TEST", "128"]
    models = []
    for name, period in (("plain", "0"), ("scored", "2")):
        evaluated = ["TEST.EVAL_PERIOD", period]
        assert main(arguments(shop, tmp_path / name, *more, *evaluated, weights="-retina")) == 0
        models.append(read_plain(tmp_path / name / "model_final.pth"))
    assert same_bits(models[0], models[1])


def test_resume_starts_a_run_in_a_folder_without_one(shop, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    words = [*SHORT, "TEST.PRECISE_BN.ENABLED", "False"]
    assert main(arguments(shop, tmp_path / "run", "--resume", *words)) == 0
    assert f"No run to resume in {tmp_path / 'run'}" in capsys.readouterr().out
    assert (tmp_path / "run/record.json").is_file()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int) -> None:
    at_iteration(number, die)


@pytest.fixture(scope="module")
def killed(shop, tmp_path_factory) -> Path:
    """A run that was killed after its fourth iteration; tests take copies of it."""
    output = tmp_path_factory.mktemp("killed") / "run"
    done = start_train_net(shop, output, before=die_at, told=[4]).wait()
    assert done.returncode == -signal.SIGKILL
    assert steps_in(output) == [4, 3]
    return output


@pytest.fixture
def copy(killed, tmp_path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def newest_of(output: Path) -> Path:
    return find_checkpoints(output / CHECKPOINT_FOLDER)[0]


def flip_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for index in range(41):
        content[(index + 1) * len(content) // 50] ^= 0x10
    path.write_bytes(content)


def test_a_killed_run_passes_over_a_damaged_checkpoint_and_ends_in_the_same_bits(
    finished, shop, copy
):
    newest = newest_of(copy)
    flip_bytes(newest)
    done = start_train_net(shop, copy, "--resume").wait()
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr + done.stdout
    assert_same_run(copy, finished)
    iterations = [json.loads(line)["iteration"] for line in (copy / "metrics.json").open()]
    assert iterations == sorted(set(iterations)) != []


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_run_is_resumed_from_nothing_but_its_own_checkpoints_and_says_so(
    finished, shop, copy, tmp_path, capsys
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in find_checkpoints(copy / CHECKPOINT_FOLDER):
        shutil.move(path, elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    for folder in (copy, copy / CHECKPOINT_FOLDER):
        (folder / "evil.pkl").write_bytes(pickle.dumps({"model": RunsCode(tmp_path / "ran")}))
        (folder / "last_checkpoint").write_text("evil.pkl")
    assert main(arguments(shop, copy, "--resume")) == 0
    told = capsys.readouterr()
    assert f"{copy} has no checkpoint: it starts from the beginning" in told.out + told.err
    assert "Training starts at iteration 0 of 6" in told.out
    assert not (tmp_path / "ran").exists()
    assert_same_run(copy, finished)


def rewrite(output: Path, **changes: object) -> Path:
    """Replace the checkpoints by one with other content and a fitting checksum."""
    folder = output / CHECKPOINT_FOLDER
    content = {**read_plain(newest_of(output)), **changes}
    for path in find_checkpoints(folder):
        path.unlink()
    return save_checkpoint(folder, 4, content, 1)


def test_a_checkpoint_that_does_not_fit_the_model_is_refused_by_name(shop, copy, capsys):
    tensors = read_plain(newest_of(copy))["model"]
    name, _ = tensors.popitem()
    path = rewrite(copy, model=tensors)
    assert main(arguments(shop, copy, "--resume")) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert name in told
    assert not (copy / "record.json").exists()


def test_another_number_of_processes_is_refused_unless_it_is_asked_for_by_name(shop, copy, capsys):
    rewrite(copy, world_size=2, world_sizes=[[0, 2]])
    assert main(arguments(shop, copy, "--resume")) == 2
    told = capsys.readouterr().err
    assert "world_size: 2 before, 1 now" in told
    assert "--allow-world-size-change" in told
    assert "each process forms its own batches" in told
    done = start_train_net(shop, copy, "--resume", "--allow-world-size-change").wait()
    assert done.returncode == 0, done.stderr
    assert "until step 4 there were 2. The batch size stays the same" in done.stderr
    assert "its views stay the same" not in done.stdout + done.stderr
    record = read_record(copy / "record.json")
    assert record["details"]["world_sizes"] == [[0, 2], [4, 1]]
    assert record["protocol"]["definition"]["processes"] == [2, 1]


@pytest.mark.slow
def test_two_ranks_that_are_stopped_resume_to_the_bit(shop, tmp_path):
    undisturbed, output = tmp_path / "undisturbed", tmp_path / "run"
    words = ["--num-gpus=2", "SOLVER.MAX_ITER", "20", "SOLVER.STEPS", "(15,)"]
    words += ["MODEL.RESNETS.NORM", "naiveSyncBN"]
    done = start_train_net(shop, undisturbed, *words).wait()
    assert done.returncode == 0, done.stderr
    stopped = start_train_net(shop, output, *words)
    wait_until(lambda: bool(steps_in(output)) or not stopped.process.is_alive(), 200)
    stopped.process.terminate()
    assert stopped.wait().returncode == 128 + signal.SIGTERM, stopped.stderr
    assert 0 < steps_in(output)[0] < 20
    done = start_train_net(shop, output, "--resume", *words).wait()
    assert done.returncode == 0, done.stderr
    assert_same_run(output, undisturbed)
    assert read_record(output / "record.json")["details"]["world_sizes"] == [[0, 2]]


def wait_at(number: int, gate: Path) -> None:
    def wait() -> None:
        gate.with_suffix(".reached").touch()
        while not gate.exists():
            time.sleep(0.01)

    at_iteration(number, wait)


def be_impatient() -> None:
    import kscl.runtime.files

    kscl.runtime.files.LOCK_PATIENCE = 0.2


def test_of_two_runs_into_one_folder_the_second_is_refused(finished, shop, tmp_path):
    output, gate = tmp_path / "run", tmp_path / "gate"
    first = start_train_net(shop, output, "--auto-resume", before=wait_at, told=[3, gate])
    wait_until(lambda: gate.with_suffix(".reached").exists() or first.returncode is not None, 200)
    inner = tmp_path / "second"
    inner.mkdir()
    (inner / "run").symlink_to(output)
    second = start_train_net(shop, inner / "run", "--auto-resume", before=be_impatient).wait()
    gate.touch()
    first.wait()
    assert second.returncode == 2
    assert "Another run is writing to" in second.stderr
    assert first.returncode == 0, first.stderr
    assert_same_run(output, finished)


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
    assert told.format("then") in capsys.readouterr().err
    score = ["--eval-only", *words, "MODEL.WEIGHTS", str(output / "model_final.pth")]
    assert main(arguments(shop, tmp_path / "again", *score)) == 2
    error = capsys.readouterr().err
    assert told.format("in training") in error
    assert "KSCL.CLASS_NAMES" in error
    (output / "record.json").unlink()  # so that the checkpoint is what is resumed
    assert main(arguments(shop, output, "--resume", *words)) == 2
    assert told.format("then") in capsys.readouterr().err


@pytest.fixture
def unfinished(finished, tmp_path) -> Path:
    """A run that ended after its last checkpoint, before its record."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "record.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("INPUT.FORMAT", "BGR", "INPUT.FORMAT: 'RGB' in training, 'BGR' now"),
        ("MODEL.PIXEL_MEAN", "[0.0, 0.0, 0.0]", "MODEL.PIXEL_MEAN: [123."),
        ("KSCL.CLASS_NAMES", "['dog', 'cat']", "classes: ['cat', 'dog'] in training"),
        ("SOLVER.MAX_ITER", "7", "SOLVER.MAX_ITER: 6 in training, 7 now"),
    ],
)
def test_a_detector_is_scored_only_on_the_input_it_was_trained_on(
    finished, shop, tmp_path, capsys, key, value, told
):
    words = ["--eval-only", "MODEL.WEIGHTS", str(finished / "model_final.pth"), key, value]
    assert main(arguments(shop, tmp_path / "again", *words)) == 2
    error = capsys.readouterr().err
    assert told in error
    assert f"Use {finished / 'config.yaml'}" in error
    assert not (tmp_path / "again").exists()


def test_a_scaled_protocol_resumes_on_no_other_number_of_processes_and_says_why(
    shop, unfinished, capsys
):
    config = read_plain(newest_of(unfinished))["config"]
    config["SOLVER"]["REFERENCE_WORLD_SIZE"] = 2
    rewrite(unfinished, config=config, world_size=2)
    for flags in (["--resume"], ["--resume", "--allow-world-size-change"]):
        words = arguments(shop, unfinished, *flags, "SOLVER.REFERENCE_WORLD_SIZE", "2")
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "SOLVER.IMS_PER_BATCH: 2 before, 1 now" in told
        assert "SOLVER.BASE_LR: 0.03 before, 0.015 now" in told
        assert "SOLVER.REFERENCE_WORLD_SIZE scales batch" in told
        assert "must resume on the same number" in told
        assert "the record says so" not in told


def eval_only(run: Path, *more: str) -> int:
    return main(
        ["--config-file", str(run / "config.yaml"), "--eval-only", "OUTPUT_DIR", str(run), *more]
    )


def same_but_for_time(run: Path) -> dict:
    record = read_record(run / "record.json")
    return {
        name: record[name] for name in ("name", "protocol", "metrics", "inputs", "data", "seed")
    }


@pytest.mark.portable
def test_a_run_is_scored_again_in_its_own_folder_with_a_record_beside_its_own(finished, tmp_path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    before = (run / "record.json").read_bytes()
    named = ("MODEL.WEIGHTS", str(run / "model_final.pth"))
    for more, folder in (((), "inference"), (named, "inference-2")):
        assert eval_only(run, *more) == 0
        assert same_but_for_time(run / folder) == same_but_for_time(run)
        assert (run / folder / "detections.npz").is_file()
    assert (run / "record.json").read_bytes() == before
    details = read_record(run / "inference/record.json")["details"]
    assert details["backbone"] == read_record(run / "record.json")["details"]["backbone"]


def test_the_newest_checkpoint_of_an_unfinished_run_is_scored_under_a_name_of_its_own(
    unfinished, capsys
):
    (unfinished / "model_final.pth").unlink()
    find_checkpoints(unfinished / CHECKPOINT_FOLDER)[0].unlink()
    assert eval_only(unfinished) == 0
    record = read_record(unfinished / "inference" / "record.json")
    assert record["protocol"]["id"].endswith(" (after 5 of 6 iterations)")
    assert record["protocol"]["definition"]["iterations"] == 5
    assert record["inputs"]["weights"]
    for path in find_checkpoints(unfinished / CHECKPOINT_FOLDER):
        path.unlink()
    assert eval_only(unfinished) == 2
    assert "no weights yet" in capsys.readouterr().err


def test_a_folder_that_is_not_free_is_refused_before_anything_is_read(
    finished, shop, tmp_path, capsys
):
    (tmp_path / "output" / "kscl").mkdir(parents=True)
    nowhere = ("DATASETS.TRAIN", "('voc:nowhere:train',)", "MODEL.WEIGHTS", "nowhere.pth")
    for folder, reason in (
        (tmp_path / "output", "was not created by this tool"),
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
        (told,) = re.findall(r"Next: kscl train-net (.*)", capsys.readouterr().out)
        config, path, *overrides = shlex.split(told)
        assert main([config, path, "--print-config", *overrides]) == 0
        folders += re.findall(r"^OUTPUT_DIR: (.*)", capsys.readouterr().out, flags=re.M)
    assert folders == [str(tmp_path / "one-run"), str(tmp_path / "two-run")]
