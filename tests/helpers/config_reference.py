"""Write the references of docs/ from the declarations of configs and suites and their comments.

    python -m tests.helpers.config_reference

It is here because it reads all three packages, which no package may. A test keeps docs/ current.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

import linear_eval.config as linear_eval_config
import linear_eval.rules as linear_eval_rules
from detection import config as detection_config
from kscl.benchmark.suite import spec
from kscl.config import rules
from kscl.config.comments import comments_of
from kscl.config.defaults import pretrain_defaults
from kscl.config.merge import NAMED_VALUES
from kscl.config.tree import leaves, one_line, plain
from kscl.views import recipes

DOCS = Path(__file__).resolve().parents[2] / "docs"
MADE = (
    "<!-- Made by `make docs` from the comments of the defaults. Change those, not this file. -->\n"
)
CONFIG_INTRODUCTION = """
Every tool with a config takes `--config-file FILE` and, at the end, overrides `KEY VALUE`:

    python tools/pretrain.py --config-file configs/pretrain/shapes_kscl.yaml SOLVER.EPOCHS 8

A file may name a file that it changes: `_BASE_: other.yaml`. `--print-config` prints the resolved
config with the comments below, as YAML that can be fed back. An unknown key, a value of the wrong
type and a value that breaks a rule are errors, all reported at once.
"""
AUGMENT_INTRODUCTION = """
### AUGMENT

A list of ops, applied in its order; a parameter that is left out has its default. Meanings and
units are torchvision's. Of two numbers, one is drawn between them for every view.

"""
DETECTION_INTRODUCTION = """
Detection configs are Detectron2's own, with one section more. Detectron2 explains its keys in its
[config reference](https://detectron2.readthedocs.io/en/latest/modules/config.html).
`SOLVER.REFERENCE_WORLD_SIZE` is the number of processes that batch, learning rate and iterations
are written for: on another number they are scaled, and 0 uses them as they are.
"""
SUITE_INTRODUCTION = """
A suite compares backbones: `python tools/run_suite.py FILE` pretrains every contender, evaluates it
in every way and writes one leaderboard. `--dry-run` shows what is done and what is left. See
configs/suites/ for examples; own_data.yaml is a template.
"""


def config_page() -> str:
    """Return docs/config.md."""
    detection = CfgNode()
    detection_config.add_kscl_config(detection)
    parts = [
        MADE,
        "# Config reference\n",
        CONFIG_INTRODUCTION,
        "\n## Pretraining (tools/pretrain.py)\n",
        *_sections(
            pretrain_defaults(), comments_of(pretrain_defaults), rules.CHOICES, rules.RANGES
        ),
        AUGMENT_INTRODUCTION,
        *_augmentations(),
        "\n## Linear evaluation (tools/linear_eval.py)\n",
        *_sections(
            linear_eval_config.linear_eval_defaults(),
            comments_of(linear_eval_config.linear_eval_defaults),
            linear_eval_rules.CHOICES,
            linear_eval_rules.RANGES,
        ),
        "\n## Detection (tools/train_net.py)\n",
        DETECTION_INTRODUCTION,
        *_sections(
            detection, comments_of(detection_config.add_kscl_config), detection_config.CHOICES, {}
        ),
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
        comments = comments_of(declaration)
        fields = {field.name: field for field in dataclasses.fields(declaration)}
        rows = [
            (f"`{key}`", spec.IN_WORDS[kind], _default_of(fields[key]), comments[key])
            for key, kind in keys.items()
        ]
        parts += [f"\n## {title}\n\n{_first_line(declaration)}\n\n"]
        parts += _table(("key", "takes", "default", "meaning"), rows)
    kinds = ", ".join(f"`{kind}`" for kind in spec.EVALUATION_KINDS)
    parts += [
        "\nThe key of a contender is its name: that of its folder and, unless its overrides set "
        "`LABEL`, of its rows.\nThe key of an evaluation is its name. Where it is a kind "
        f"({kinds}), `kind` can be left out;\notherwise `kind` says it, so that a suite can have "
        f"several of one kind:\n\n{SEVERAL}\nEach protocol has its own columns on the "
        "leaderboard.\n"
    ]
    return "".join(parts)


def _sections(
    cfg: CfgNode,
    comments: Mapping[str, str],
    choices: Mapping[str, tuple[str, ...]],
    ranges: Mapping[str, rules.Range],
) -> Iterator[str]:
    """Yield a table per section, and one of the keys without a section before them."""
    top = {key: value for key, value in cfg.items() if not isinstance(value, CfgNode)}
    sections = {key: value for key, value in cfg.items() if isinstance(value, CfgNode)}
    for name, section in {"": top, **sections}.items():
        if not section and name not in comments:
            continue
        if name:
            yield f"\n### {name}\n"
        if name in comments:
            yield f"\n{comments[name]}\n"
        rows = []
        for key, value in leaves(plain(section), name):
            allowed = _choice(choices.get(key, ()))
            if key in ranges:
                allowed = ranges[key][1].split(":")[0].split(";")[0]
            rows.append((f"`{key}`", _default(key, value), allowed, comments[key]))
        if rows:
            yield "\n"
            yield from _table(("key", "default", "allowed", "meaning"), rows)


def _augmentations() -> Iterator[str]:
    """Yield a table of all ops and their parameters, and the recipes."""
    rows = []
    for op, parameters in recipes.OPS.items():
        for name, parameter in parameters.items():
            count = "two numbers" if isinstance(parameter, recipes.Pair) else "a number"
            allowed = f"{count} from {parameter.low:g} to {parameter.high:g}"
            rows.append((f"`{op}`", f"`{name}`", _default("", plain(parameter.default)), allowed))
    yield from _table(("op", "parameter", "default", "allowed"), rows)
    for name, recipe in recipes.RECIPES.items():
        yield f"\n`AUGMENT: {name}` is\n\n```yaml\nAUGMENT:\n"
        yield from (f"  - {one_line(op)}\n" for op in recipe)
        yield "```\n"


def _choice(names: tuple[str, ...]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]]) if quoted else ""


def _default(key: str, value: object) -> str:
    for name, named in NAMED_VALUES.get(key, {}).items():
        if value == plain(named):
            return f"`{name}`"
    return f"`{one_line(value)}`"


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return ""
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{one_line(plain(field.default))}`" if field.default not in ("", ()) else ""


def _first_line(declaration: type) -> str:
    return (declaration.__doc__ or "").splitlines()[0]


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
