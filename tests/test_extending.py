"""The files of docs/extending.md do what the page says, from outside the packages."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
import shutil

import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file

from kscl.data.annotations import ANNOTATION_FORMATS, parse_source, read_source
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.methods.base import build_method
from kscl.methods.batch_norm import SyncBatchNorm, batch_norms
from kscl.registry import METHODS, Registry
from linear_eval.probe import Probe
from tests.helpers.commands import ROOT, tool
from tests.helpers.data.sets import write_image
from tests.helpers.runs import TINY, draw_images, same_bits

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
RECIPE = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[1])
PLAIN = {key: yaml.safe_load(TINY)[key] for key in ("DATA", "INPUT", "BACKBONE", "SOLVER")}


@pytest.fixture
def mine(tmp_path):
    """A folder of one's own with the files of the page, and a function that runs a tool there."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    imports = [word for name in FILES for word in ("--import", name)]

    def command(name, words):
        done = tool(name, *imports, *shlex.split(words), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return tmp_path, command


def test_parts_of_ones_own_go_from_pretraining_to_a_probe_and_to_the_leaderboard(mine):
    folder, command = mine
    images = draw_images(folder / "images", count=32)
    draw_images(folder / "val", count=16, side=41)
    Image.open(next(images.rglob("*.jpg"))).save(images / "class0" / "one.pcx")
    (folder / "mine.yaml").write_text(yaml.safe_dump(PLAIN | RECIPE))
    command(
        "pretrain",
        "--config-file mine.yaml METHOD.NAME barlow_twins SOLVER.EPOCHS 2 DATA.TRAIN images "
        "OUTPUT_DIR output/run",
    )
    pretrained = json.loads((folder / "output/run/record.json").read_text())
    values = pretrained["config"]["values"]
    assert {"loss", "correlation"} < pretrained["metrics"].keys()
    assert pretrained["data"]["train"]["images"] == 33
    assert [op["op"] for op in values["AUGMENT"]] == [op["op"] for op in RECIPE["AUGMENT"]]
    command(
        "linear_eval",
        "PROBE nearest_mean NEAREST_MEAN.NORM 1 DATA.TRAIN images DATA.VAL val "
        "INPUT.SIZE 32 INPUT.RESIZE 32 DATA.NUM_WORKERS 0 DATA.CACHE_DIR cache "
        "BACKBONE.WEIGHTS output/run/backbone.safetensors OUTPUT_DIR output/probe",
    )
    probed = json.loads((folder / "output/probe/record.json").read_text())
    assert probed["protocol"]["id"] == "nearest-mean"
    assert probed["protocol"]["definition"]["norm"] == 1
    assert probed["details"]["n_train"] == 33
    command("leaderboard", "output --output-dir board")
    written = {path.suffix: path.read_text() for path in (folder / "board").iterdir()}
    header, _, line = written[".md"].split("## Overview")[1].strip().splitlines()[:3]
    cells = [[cell.strip() for cell in part.split("|")] for part in (header, line)]
    shown = dict(zip(*cells, strict=True))
    millions = pretrained["details"]["parameters"] / 1e6
    assert shown["nearest mean"] == f"{probed['metrics']['top1']:.2f}"
    assert shown["M parameters"] == f"{millions:.1f}"
    (line,) = csv.DictReader(written[".csv"].splitlines())
    assert float(line["millions"]) == millions
    (row,) = json.loads(written[".json"])["rows"]
    assert row["figures"]["millions"] == millions
    assert '"label":"M parameters"' in written[".html"]


def test_a_similarity_of_ones_own_pretrains(mine):
    folder, command = mine
    draw_images(folder / "images", count=32)
    (folder / "mine.yaml").write_text(TINY)
    command(
        "pretrain",
        "--config-file mine.yaml METHOD.SIMILARITY nearest_key SOLVER.EPOCHS 1 DATA.TRAIN images "
        "OUTPUT_DIR run",
    )
    record = json.loads((folder / "run/record.json").read_text())
    assert record["config"]["values"]["METHOD"]["SIMILARITY"] == "nearest_key"


@pytest.mark.full
def test_a_probe_of_ones_own_runs_on_two_processes(mine):
    folder, command = mine
    draw_images(folder / "train", count=32)
    draw_images(folder / "val", count=16, side=41)
    command(
        "linear_eval",
        "--num-gpus 2 PROBE nearest_mean DATA.TRAIN train DATA.VAL val INPUT.SIZE 32 "
        "INPUT.RESIZE 32 DATA.NUM_WORKERS 0 DATA.CACHE_DIR cache BACKBONE.WEIGHTS random "
        "BACKBONE.NAME test_resnet OUTPUT_DIR output",
    )
    record = json.loads((folder / "output/record.json").read_text())
    assert record["details"]["processes"] == 2


def test_an_annotation_format_of_ones_own_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ANNOTATION_FORMATS, "data", dict(ANNOTATION_FORMATS.data))
    (tmp_path / "csv_boxes.py").write_text(FILES["csv_boxes"])
    runpy.run_path(str(tmp_path / "csv_boxes.py"))
    boxes = {"a": "1,2,9,8,dog\n0,0,5,5,cat\n", "b": "1,1,4,4,dog\n"}
    (tmp_path / "boxes").mkdir()
    for name, lines in boxes.items():
        write_image(tmp_path / "images" / f"{name}.png", ord(name))
        (tmp_path / "boxes" / f"{name}.csv").write_text(lines)
    source = parse_source(f"csv:{tmp_path}/boxes:{tmp_path}/images")
    found = read_source(source).checked()
    assert found.class_names == ("cat", "dog")
    assert [len(image.objects) for image in found.images] == [2, 1]
    (tmp_path / "boxes" / "c.csv").write_text("1,1,4,4,dog\n")
    (tmp_path / "boxes" / "b.csv").write_text("3,1,2,4,cat\n")
    kinds = {problem.kind for problem in read_source(source).problems}
    assert kinds == {"missing image", "degenerate box"}


def test_a_recipe_is_complete_and_fits_on_one_screen():
    for name, text in FILES.items():
        assert text.startswith('"""'), name
        assert len(text.splitlines()) <= 50, name


@pytest.mark.full
def test_a_method_of_ones_own_is_checked_planned_pretrained_and_resumed_to_the_bit(tmp_path):
    images = draw_images(tmp_path / "images", count=32)
    (tmp_path / "barlow_twins.py").write_text(FILES["barlow_twins"])
    chosen = {"METHOD": {"NAME": "barlow_twins", "REDUNDANCY": 0.5}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(PLAIN | chosen))
    words = ["DATA.TRAIN", images, "CHECKPOINT.KEEP", "9", "LOG.PERIOD", "1"]

    def run(name, *more, folder="run"):
        given = ["--import", "barlow_twins", "--config-file", "mine.yaml", *more, *words]
        done = tool(name, *map(str, given), "OUTPUT_DIR", folder, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done

    assert json.loads(run("pretrain", "--check").stdout)["problems"] == []
    planned = run("plan", "--gpu", "V100").stdout
    assert "2 views: " in planned
    assert "(6 forward passes per image)" in planned  # two, each with a gradient
    logged = run("pretrain").stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert {"loss", "correlation"} < record["metrics"].keys()
    assert record["name"] == "barlow_twins"
    assert "barlow_twins" in record["code"]["modules"]
    assert record["config"]["values"]["METHOD"]["REDUNDANCY"] == 0.5
    assert "NUM_SHOTS" not in record["config"]["values"]["METHOD"]
    assert ", correlation " in logged
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    (tmp_path / "again" / "record.json").unlink()
    checkpoints = sorted((tmp_path / "again" / "checkpoints").iterdir())
    for path in checkpoints[len(checkpoints) // 2 :]:
        path.unlink()
    run("pretrain", "--resume", folder="again")
    first, second = (load_file(tmp_path / f / "backbone.safetensors") for f in ("run", "again"))
    assert same_bits(first, second)
    words = ["--import", "barlow_twins", "METHOD.NAME", "barlow_twins", "METHOD.RHO", "1"]
    done = tool("pretrain", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "METHOD.RHO" in done.stderr


WRONG = """
from torch import nn
from kscl.methods.base import Method, method

@method("wrong")
class Wrong(Method):
    figures = ("std",)
    def __init__(self, cfg, num_images=None):
        super().__init__(cfg, num_images)
        self.predictor = nn.BatchNorm1d(4)
    def forward(self, batch):
        return {"loss": self.embed(batch.views).sum()}
"""


def test_a_forward_pass_that_lacks_a_figure_is_an_error_that_names_it(tmp_path):
    images = draw_images(tmp_path / "images", count=32)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(PLAIN))
    words = ["--import", "wrong", "--config-file", "mine.yaml", "METHOD.NAME", "wrong"]
    done = tool("pretrain", *words, "DATA.TRAIN", str(images), cwd=tmp_path)
    assert done.returncode == 2
    assert "METHOD.NAME wrong" in done.stderr
    assert "loss, std" in done.stderr


def test_layers_that_a_method_adds_are_synchronized_like_the_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(METHODS, "data", dict(METHODS.data))
    (tmp_path / "wrong.py").write_text(WRONG)
    runpy.run_path(str(tmp_path / "wrong.py"))
    words = ["METHOD.NAME", "wrong", "SOLVER.SYNC_BATCH_NORM", "true", "BACKBONE.NAME", "resnet18"]
    built = build_method(load_config(None, words))
    assert isinstance(built.predictor, SyncBatchNorm)
    assert all(isinstance(norm, SyncBatchNorm) for norm in batch_norms(built))


def test_a_probe_that_saves_a_state_must_restore_it():
    with pytest.raises(KsclError, match=r"Forgetful.*prepare"):
        type("Forgetful", (Probe,), {"state_dict": lambda self: {"step": 1}})


def test_a_module_that_cannot_be_imported_is_named(tmp_path):
    done = tool("pretrain", "--import", "no_such_module", "SEED", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--import no_such_module" in done.stderr


def test_a_name_is_registered_once_and_an_unknown_one_lists_all():
    parts: Registry[int] = Registry("part")
    parts.register("one", 1)
    with pytest.raises(KsclError, match="'one'"):
        parts.register("one", 2)
    with pytest.raises(KsclError, match=r"'two'.*one"):
        parts["two"]
