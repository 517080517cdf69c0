"""Write the references of docs/ from the declarations of configs and suites and their comments.

    python -m tests.helpers.config_reference

It is here because it reads all three packages, which no package may. A test keeps docs/ current.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detection.config import Kscl
from kscl.benchmark.suite import spec
from kscl.config import Key, Schema, one_line, plain
from kscl.keys import PRETRAIN
from kscl.methods.keys import declared_keys, method_keys
from kscl.registry import METHODS
from kscl.run.task import evaluation_kinds
from kscl.views.augment import AUGMENTATIONS
from kscl.views.recipes import RECIPES
from linear_eval.probe import schema

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE = (
    "<!-- Made by `make docs` from the declarations of the keys. Change those, not this file. -->\n"
)
CONFIG_INTRODUCTION = """
Every tool with a config takes `--config-file FILE` and, at the end, overrides `KEY VALUE`:

    kscl pretrain --config-file configs/pretrain/shapes_kscl.yaml SOLVER.EPOCHS 8

A file may name a file that it changes: `_BASE_: other.yaml`. `--print-config` prints the resolved
config with the sentences below, as YAML that can be fed back. An unknown key, a value of the wrong
type and a value that breaks a rule are errors, all reported at once.
"""
AUGMENT_INTRODUCTION = """
### AUGMENT

A list of ops, applied in order; a parameter that is left out has its default. From a range of two
numbers, one is drawn for every view.

"""
DETECTION_INTRODUCTION = """
Detection configs are Detectron2's own, with one section more. Detectron2 explains its keys in its
[config reference](https://detectron2.readthedocs.io/en/latest/modules/config.html).
`SOLVER.REFERENCE_WORLD_SIZE` is 0 in all shipped protocols: batch, learning rate and iterations are
used as they are on any number of processes. Another value is the number that they are written for:
on fewer or more processes they are scaled, which is another protocol.
`TEST.EVAL_PERIOD` scores the detector every so many iterations (`bbox/AP50` in `metrics.json`); the
training is the same with and without it, and the record has the number at the end.
"""
SUITE_INTRODUCTION = """
A suite compares backbones: `kscl run FILE` pretrains every contender, evaluates it
in every way and writes one leaderboard. `--dry-run` shows what is done, runs and is left. See
configs/suites/ for examples; own_data.yaml is a template.
"""


def config_page() -> str:
    """Return docs/config.md."""
    parts = [
        MADE,
        "# Config reference\n",
        CONFIG_INTRODUCTION,
        "\n## Pretraining (kscl pretrain)\n",
        *_sections(PRETRAIN),
        *_other_methods(),
        AUGMENT_INTRODUCTION,
        *_augmentations(),
        "\n## Linear evaluation (kscl probe)\n",
        *_sections(schema()),
        "\n## Detection (kscl train-net)\n",
        DETECTION_INTRODUCTION,
        *_sections(Schema.of(Kscl)),
    ]
    return "".join(parts)


SEVERAL = """\
```yaml
num_gpus: 8
evaluations:
  linear: {config: linear_eval/imagenet_linear_moco.yaml}
  knn: {config: linear_eval/knn.yaml, num_gpus: 1}
  finetune1: {kind: finetune, config: linear_eval/finetune_imagenet_1percent.yaml}
  finetune10: {kind: finetune, config: linear_eval/finetune_imagenet_10percent.yaml}
  voc: {kind: detection, config: detection/voc0712_c4_24k_moco.yaml, trials: 5}
  coco: {kind: detection, config: detection/coco_fpn_1x.yaml}
```
"""


def suite_page() -> str:
    """Return docs/suite.md."""
    parts = [MADE, "# Suite reference\n", SUITE_INTRODUCTION]
    for title, declaration, keys in (
        ("The suite", spec.Suite, spec.KEYS_OF_SUITE),
        ("A contender", spec.Contender, spec.KEYS_OF_CONTENDER),
        ("An evaluation", spec.Evaluation, spec.KEYS_OF_EVALUATION),
    ):
        comments = _comments_of(declaration)
        fields = {it.name.rstrip("_"): it for it in dataclasses.fields(declaration)}
        rows = [
            (f"`{key}`", spec.IN_WORDS[kind], _default_of(fields[key]), comments[key])
            for key, kind in keys.items()
        ]
        about, *_ = (declaration.__doc__ or "").splitlines()
        parts += [f"\n## {title}\n\n{about}\n\n"]
        parts += _table(("key", "takes", "default", "meaning"), rows)
    kinds = ", ".join(f"`{kind}`" for kind in evaluation_kinds())
    parts += [
        "\nThe key of a contender is its name: that of its folder and, unless its overrides set "
        "`LABEL`, of its rows.\nThe key of an evaluation is its name. Where it is a kind "
        f"({kinds}), `kind` can be left out;\notherwise `kind` says it, so that a suite can have "
        f"several of one kind:\n\n{SEVERAL}\nEach protocol has its own columns on the "
        "leaderboard.\n"
    ]
    return "".join(parts)


def _sections(schema: Schema) -> Iterator[str]:
    """Yield a table per top-level section, and one of the keys without a section before them."""
    by_section: dict[str, list[str]] = {"": []}
    for name in schema.keys:
        section = name.partition(".")[0] if "." in name else ""
        by_section.setdefault(section, []).append(name)
    for section, names in by_section.items():
        if section:
            yield f"\n### {section}\n"
        if section in schema.docs:
            yield f"\n{schema.docs[section]}\n"
        yield "\n"
        yield from _table_of_keys({name: schema.keys[name] for name in names})


def _table_of_keys(keys: Mapping[str, Key]) -> Iterator[str]:
    rows = [(f"`{name}`", _default(key), key.allowed, key.doc) for name, key in keys.items()]
    return _table(("key", "default", "allowed", "meaning"), rows)


def _other_methods() -> Iterator[str]:
    """Yield a table of the keys of each method but KSCL, whose keys are in the schema above."""
    for name in METHODS:
        if name != "kscl":
            yield f"\n### METHOD of {name}\n"
            yield f"\nWith `METHOD.NAME {name}`, instead of KSCL's keys.\n\n"
            yield from _table_of_keys(declared_keys(method_keys(name)))


def _augmentations() -> Iterator[str]:
    """Yield a table of all ops and their parameters, and the recipes."""
    yield from _table(("op", "meaning"), [(f"`{n}`", a.doc) for n, a in AUGMENTATIONS.items()])
    rows = []
    for op, augmentation in AUGMENTATIONS.items():
        for name, parameter in augmentation.parameters.items():
            count = "two numbers" if isinstance(parameter.default, tuple) else "a number"
            default = f"`{one_line(plain(parameter.default))}`"
            allowed = f"{count} {parameter.bounds}"
            rows.append((f"`{op}`", f"`{name}`", default, allowed, parameter.doc))
    yield "\n"
    yield from _table(("op", "parameter", "default", "allowed", "meaning"), rows)
    for name, recipe in RECIPES.items():
        yield f"\n`AUGMENT: {name}` is\n\n```yaml\nAUGMENT:\n"
        yield from (f"  - {one_line(op)}\n" for op in recipe)
        yield "```\n"


def _default(key: Key) -> str:
    value = plain(key.default)
    for name, named in key.named.items():
        if value == plain(named):
            return f"`{name}`"
    return f"`{one_line(value)}`"


def _comments_of(declaration: type) -> dict[str, str]:
    """Return the comments above and behind every field of a class."""
    source = textwrap.dedent(inspect.getsource(declaration))
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AnnAssign):
            continue
        first = node.lineno
        while first - 1 in comments and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        text = [comments[n] for n in range(first, (node.end_lineno or first) + 1) if n in comments]
        if text:
            found[ast.unparse(node.target).rstrip("_")] = " ".join(text)
    return found


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return ""
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{one_line(plain(field.default))}`" if field.default not in ("", ()) else ""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |\n"
    yield f"|{' --- |' * len(header)}\n"
    for row in rows:
        cells = (cell.replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |\n"


PAGES = {"config.md": config_page, "suite.md": suite_page}


def main() -> None:
    """Write every page."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(DOCS / name)


if __name__ == "__main__":
    main()
