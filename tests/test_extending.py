"""The files of docs/extending.md do what the page says, from outside the packages."""

from __future__ import annotations

import csv
import json
import re

import pytest
import yaml
from PIL import Image

from kscl.errors import KsclError
from kscl.registry import Registry
from tests.helpers.commands import ROOT, tool
from tests.helpers.leaderboard_records import backbone_of, linear, pretraining, write_all
from tests.helpers.runs import TINY, draw_images

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
RECIPE = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[1])


def test_a_similarity_an_augmentation_and_an_image_format_of_ones_own_pretrain(tmp_path):
    images = draw_images(tmp_path / "images", count=32)
    Image.open(next(images.rglob("*.jpg"))).save(images / "class0" / "one.pcx")
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    values = yaml.safe_load(TINY) | RECIPE
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    words = ["METHOD.SIMILARITY", "nearest_key", "SOLVER.EPOCHS", "2", "DATA.TRAIN", str(images)]
    imports = [word for name in FILES for word in ("--import", name)]
    done = tool(
        "pretrain",
        *imports,
        "--config-file",
        "mine.yaml",
        *words,
        "OUTPUT_DIR",
        "run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["config"]["values"]["METHOD"]["SIMILARITY"] == "nearest_key"
    assert record["data"]["train"]["images"] == 33
    assert [op["op"] for op in record["config"]["values"]["AUGMENT"]] == [
        op["op"] for op in RECIPE["AUGMENT"]
    ]


def test_a_column_of_ones_own_is_in_every_format_of_the_board(tmp_path):
    (tmp_path / "size_column.py").write_text(FILES["size_column"])
    made = pretraining(details={"parameters": 23_500_000})
    write_all(tmp_path / "records", [made, linear(60.0, backbone_of(made))])
    done = tool(
        "leaderboard", "records", "--output-dir", "board", "--import", "size_column", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    written = {path.suffix: path.read_text() for path in (tmp_path / "board").iterdir()}
    header, _, line = written[".md"].split("## Overview")[1].strip().splitlines()[:3]
    cells = dict(zip(header.split("|"), line.split("|"), strict=True))
    assert {name.strip(): cell.strip() for name, cell in cells.items()}["M parameters"] == "23.5"
    (line,) = csv.DictReader(written[".csv"].splitlines())
    assert float(line["millions"]) == 23.5
    (row,) = json.loads(written[".json"])["rows"]
    assert row["figures"]["millions"] == 23.5
    assert '"label":"M parameters"' in written[".html"]


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
