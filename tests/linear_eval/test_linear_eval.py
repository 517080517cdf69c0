"""The tool as a user meets it: records, seeds, foreign backbones, and errors that help."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import safetensors
import timm
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.benchmark.leaderboard.rows import build_board
from kscl.records.record import find_records, read_record
from kscl.runtime.files import sha256_of
from linear_eval.backbone import load
from linear_eval.commands.linear_eval import main
from linear_eval.probe import load_linear_eval_config, registered
from tests.helpers.commands import ROOT
from tests.helpers.data.digits import config, overrides
from tests.helpers.runs import children, wait_until

CACHED = ("PROBE", "cached", "SOLVER.SCHEDULE", "cosine")


@pytest.fixture
def backbone(digits, tmp_path):
    kwargs = json.loads(json.dumps(config(digits, tmp_path).BACKBONE.KWARGS))
    return load_backbone("random", "resnet18", kwargs, seed=5).backbone, kwargs


@pytest.mark.smoke
def test_three_seeds_give_three_records_and_one_line(digits, tmp_path, capsys):
    assert main(["--num-seeds", "3", *overrides(digits, tmp_path / "three", *CACHED)]) == 0
    records = find_records(tmp_path / "three").records
    assert sorted(path.parent.name for path in records) == ["seed0", "seed1", "seed2"]
    assert sorted(record["seed"] for record in records.values()) == [0, 1, 2]
    assert len({record["protocol"]["hash"] for record in records.values()}) == 1
    values = torch.tensor([record["metrics"]["top1"] for record in records.values()])
    line = capsys.readouterr().out
    assert f"top1 {values.mean():.2f} ± {values.std():.2f}" in line
    assert "over seeds 0, 1, 2" in line
    words = overrides(digits, tmp_path / "one", "PROBE", "knn", "KNN.K", "[5]", "SEED", 4)
    assert main(["--num-seeds", "-1", *words]) == 2
    assert "--num-seeds must be at least 1, got -1" in capsys.readouterr().err
    assert main(["--num-seeds", "1", *words]) == 0
    assert [path.parent.name for path in find_records(tmp_path / "one").records] == ["seed4"]


def test_the_record_holds_what_a_reader_needs(digits, tmp_path, backbone):
    network, kwargs = backbone
    source = {"method": "kscl", "epochs": 2, "num_shots": 5, "rho": 0.4, "seed": 7}
    file = tmp_path / "backbone.safetensors"
    save_backbone(file, network.state_dict(), Description("resnet18", kwargs, source=source))
    words = overrides(digits, tmp_path / "run", *CACHED, "BACKBONE.WEIGHTS", file)
    assert main(words) == 0
    record = read_record(tmp_path / "run/record.json")
    details = record["details"]
    assert (record["kind"], record["name"]) == ("linear", "kscl")
    assert record["protocol"]["id"] == "linear-cached"
    assert set(record["metrics"]) == {"top1", "top5"}
    assert record["inputs"] == {"backbone": sha256_of(file)}
    assert set(record["data"]) == {"train", "val"}
    assert details["n"] == 60
    assert list(details["per_class"]) == details["classes"] == [f"digit_{n}" for n in range(10)]
    low, high = details["confidence_interval"]["top1"]
    assert low < record["metrics"]["top1"] < high
    assert len(details["sweep"]) == 16
    assert details["epochs"] == 4
    described = {key: details["backbone"][key] for key in source}
    assert described == source
    assert details["backbone"]["batch_norm_calibrated_on"] == 0
    with safetensors.safe_open(tmp_path / "run/classifier.safetensors", "pt") as classifier:
        assert classifier.get_tensor("weight").shape == (10, 32)
        assert json.loads(classifier.metadata()["classes"]) == details["classes"]


def test_a_transformer_for_one_size_takes_any_and_pads_to_whole_patches(digits, tmp_path):
    name = "vit_small_patch14_reg4_dinov2"  # made for images of 518
    small = {"embed_dim": 24, "depth": 1, "num_heads": 2}
    given = ("BACKBONE.NAME", name, "BACKBONE.KWARGS", small, "PROBE", "knn", "KNN.K", "[5]")
    assert main(overrides(digits, tmp_path / "run", *given)) == 0
    details = read_record(tmp_path / "run/record.json")["details"]
    assert (details["backbone"]["arch"], details["backbone"]["kwargs"]) == (name, small)

    backbone = load(config(digits, tmp_path, *given)).backbone  # for images of 24
    reference = timm.create_model(name, num_classes=0, img_size=28, **small).eval()
    state = backbone.state_dict()
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], [2, 2], num_prefix_tokens=0)
    reference.load_state_dict(state)
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = reference(F.pad(images, (0, 4, 0, 4)))
        torch.testing.assert_close(backbone(images), expected)


def test_the_same_seed_gives_the_same_number_and_another_seed_other_weights(digits, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert main(overrides(digits, tmp_path / name, *CACHED, "SEED", seed)) == 0
    a, b, c = (read_record(tmp_path / name / "record.json") for name in "abc")
    for field in ("metrics", "inputs", "protocol"):
        assert a[field] == b[field]
    assert a["details"]["sweep"] == b["details"]["sweep"]
    assert a["inputs"] != c["inputs"]
    assert a["config"]["hash"] == b["config"]["hash"] != c["config"]["hash"]


def test_several_numbers_of_neighbors_have_a_record_each_from_one_pass(digits, tmp_path):
    words = overrides(digits, tmp_path / "run", "PROBE", "knn", "KNN.K", "[3, 40]", "SEED", 77)
    assert main(words) == 0
    pair = [read_record(tmp_path / "run" / name) for name in ("record.json", "knn40.record.json")]
    assert [record.protocol.id for record in pair] == ["knn3-T0.07", "knn40-T0.07"]
    assert pair[0].kind == "knn"
    assert pair[0].metrics.keys() == {"top1"}
    assert pair[0].metrics["top1"] > 30  # ten classes
    assert len({record.protocol.hash for record in pair}) == 2
    assert len(build_board([tmp_path / "run"]).sections) == 2
    alone = overrides(digits, tmp_path / "alone", "PROBE", "knn", "KNN.K", "[40]", "SEED", 77)
    assert main(alone) == 0
    record = read_record(tmp_path / "alone" / "record.json")
    assert record.metrics == pair[1].metrics
    assert record.protocol == pair[1].protocol


def test_no_image_is_decoded_twice_for_two_probes_of_one_backbone(digits, tmp_path):
    decoded = []
    for probe in ("knn", "cached", "knn"):
        cache = ("DATA.CACHE_DIR", tmp_path / "cache")
        run = tmp_path / f"{probe}{len(decoded)}"
        assert main(overrides(digits, run, "PROBE", probe, *cache)) == 0
        decoded.append(read_record(run / "record.json").details["images_decoded_for_features"])
    # The first calibrates random weights on 64 images and reads all 160 + 60.
    assert decoded == [64 + 220, 0, 0]


def test_a_moco_checkpoint_is_named_after_its_file_and_a_foreign_tensor_stops_the_run(
    digits, tmp_path, backbone, capsys
):
    prefixed = {f"module.encoder_q.{key}": value for key, value in backbone[0].state_dict().items()}
    path = tmp_path / "moco.pth.tar"
    more = ("PROBE", "knn", "KNN.K", "[5]", "BACKBONE.WEIGHTS", path)
    torch.save({"state_dict": prefixed, "epoch": 200}, path)
    assert main(overrides(digits, tmp_path / "run", *more)) == 0
    record = read_record(tmp_path / "run" / "record.json")
    assert record["name"] == "moco"
    assert "moco" in record["details"]["backbone"]["weights"]
    torch.save({"state_dict": prefixed | {"module.encoder_q.layer9.weight": torch.zeros(1)}}, path)
    assert main(overrides(digits, tmp_path / "other", *more)) == 2
    assert "layer9.weight" in capsys.readouterr().err


def test_a_finished_evaluation_is_kept_and_does_not_answer_for_other_weights_or_images(
    digits, tmp_path, backbone, capsys
):
    network, kwargs = backbone
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for number, file in enumerate(files):
        state = {name: value + number for name, value in network.state_dict().items()}
        save_backbone(file, state, Description("resnet18", kwargs))
    more = ("PROBE", "knn", "KNN.K", "[5]", "BACKBONE.WEIGHTS", files[0])
    words = overrides(digits, tmp_path / "run", *more)
    assert main(words) == 0
    before = (tmp_path / "run/record.json").read_bytes()
    assert main(words) == 2
    assert "--resume" in capsys.readouterr().err
    weights = ["BACKBONE.WEIGHTS", str(files[1])]
    other = shutil.copytree(digits / "val", tmp_path / "val")
    assert main(["--auto-resume", *words, "DATA.VAL", str(other)]) == 0  # equal images
    assert "top-1" in capsys.readouterr().out
    assert (tmp_path / "run/record.json").read_bytes() == before
    next(other.rglob("*.png")).unlink()
    for changed, named in (
        (weights, f"BACKBONE.WEIGHTS {files[1]}"),
        (["DATA.VAL", str(other)], f"DATA.VAL {other}"),
    ):
        code = main(["--auto-resume", *words, *changed])
        told = capsys.readouterr()
        assert code == 2
        assert named in told.err
        assert "top-1" not in told.out


def test_a_probe_whose_val_folder_or_weights_file_moved_resumes(
    digits, tmp_path, backbone, monkeypatch
):
    network, kwargs = backbone
    places = {"before": tmp_path / "before", "after": tmp_path / "after"}
    shutil.copytree(digits / "val", places["before"] / "val")
    weights = places["before"] / "backbone.safetensors"
    save_backbone(weights, network.state_dict(), Description("resnet18", kwargs))

    def words(place):
        moved = ("DATA.VAL", place / "val", "BACKBONE.WEIGHTS", place / weights.name)
        return overrides(digits, tmp_path / "run", *CACHED, *moved)

    with monkeypatch.context() as crash:
        crash.setattr("linear_eval.probe.write_record", stop_here)
        with pytest.raises(KeyboardInterrupt):
            main.__wrapped__(words(places["before"]))
    assert (tmp_path / "run/config.yaml").exists()
    places["before"].rename(places["after"])
    assert main(["--resume", *words(places["after"])]) == 0
    assert read_record(tmp_path / "run/record.json").inputs["backbone"]


def stop_here(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_record_that_is_none_is_named_before_any_work(digits, tmp_path, capsys):
    words = overrides(digits, tmp_path / "run", "PROBE", "knn")
    assert main(words) == 0
    record = tmp_path / "run/record.json"
    for content in (b"", b"{}", b"\xff", b"[" * 100_000):
        record.write_bytes(content)
        assert main(["--auto-resume", *words]) == 2
        error = capsys.readouterr().err
        assert f"{record}: " in error
        assert "Delete it" in error
        assert record.read_bytes() == content
    record.unlink()
    record.symlink_to("nowhere")  # could not be written at the end
    assert main(["--auto-resume", *words]) == 2
    record.unlink()
    assert main(["--auto-resume", *words]) == 0
    assert read_record(record).kind == "knn"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("BACKBONE.WEIGHTS", ""), "BACKBONE.WEIGHTS"),
        (("BACKBONE.WEIGHTS", "nowhere.pth"), "nowhere.pth"),
        (("BACKBONE.NAME", "", "BACKBONE.KWARGS", "{}"), "BACKBONE.NAME resnet50"),
        (("CACHED.LR", "1"), "CACHED.LRS"),
    ],
)
def test_what_a_user_can_fix_is_one_message(digits, tmp_path, capsys, words, reason):
    assert main(overrides(digits, tmp_path / "run", *words)) == 2
    text = capsys.readouterr().err
    assert reason in text
    assert "Traceback" not in text
    # The corrected command is not blocked by what the first one left.
    assert not (tmp_path / "run/config.yaml").exists()


def test_the_printed_config_can_be_fed_back(capsys, tmp_path):
    assert main(["--print-config", "--config-file", "linear_eval/linear_cached.yaml"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    again = load_linear_eval_config(tmp_path / "again.yaml")
    assert again.SOLVER.SCHEDULE == "cosine"


def test_only_its_own_file_names_a_probe():
    for path in (ROOT / "linear_eval").rglob("*.py"):
        if path.parent.name != "probes":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found = {node.value for node in nodes if isinstance(node, ast.Constant)}
            default = {"online"} if path.name == "config.py" else set()
            assert found & registered().keys() == default, path


def assert_one_line(text, *words):
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line


def test_a_cache_that_cannot_be_written(digits, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("not a folder")
    words = overrides(digits, tmp_path / "run", "PROBE", "knn", "DATA.CACHE_DIR", file / "cache")
    assert main(words) == 2
    assert_one_line(capsys.readouterr().err, str(file), "DATA.CACHE_DIR")


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_loader_worker_that_is_killed(digits, tmp_path):
    changes = ("PROBE", "online", "SOLVER.EPOCHS", 1000, "DATA.NUM_WORKERS", 2)
    words = overrides(digits, tmp_path / "run", *changes, "SOLVER.MILESTONES", "[999]")
    command = [sys.executable, "-W", "ignore", ROOT / "tools" / "linear_eval.py", *words]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, command)), stderr=file, stdout=file, cwd=ROOT)
    try:
        wait_until(lambda: len(children(process.pid)) >= 2, 120)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        assert process.wait(120) == 2, log.read_text()
    finally:
        process.kill()
    assert_one_line(log.read_text(), "Loader worker", "DATA.NUM_WORKERS")
