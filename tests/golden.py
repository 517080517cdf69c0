"""Compare the numbers of the working tree with those of another commit, to the bit (make golden).

Both trees run on this machine, by the same commands: short pretrainings with every dictionary and
similarity, every probe, and two iterations and the scores of every detector family. Weights,
losses and metrics must be equal. Nothing is kept: bits differ from CPU to CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
# Parts of names of measurements.
NOT_COMPARED = ("second", "minutes", "waiting", "time", "eta", "memory")

SHAPES = (
    "--num-classes 5 --unlabeled 64 --train 60 --val 30 --detection-train 24 --detection-test 16 "
    "--image-size 48 --detection-size 96 --min-objects 1 --max-objects 2 --workers 1"
)
TINY = (
    "DATA.NUM_WORKERS 0 INPUT.SIZE 32 SOLVER.MAX_STEPS 10 SOLVER.BATCH_SIZE 16 LOG.PERIOD 1 "
    "DICTIONARY.QUEUE_LENGTH 32 SOLVER.WARMUP_EPOCHS 0.0 KEY_ENCODER.BATCH_NORM_GROUPS 2"
)
SHARED = "DICTIONARY.TYPE minibatch KEY_ENCODER.TYPE shared KEY_ENCODER.BATCH_NORM_GROUPS 1"
SMALL = "VIEWS.SMALL.COUNT 2 VIEWS.SMALL.SIZE 16"
PRETRAIN = {
    "moco": "shapes_moco.yaml",
    "kscl": "shapes_kscl.yaml",
    "kscl_sgd": "shapes_kscl.yaml SOLVER.OPTIMIZER sgd PROJECTOR.TYPE mlp "
    "SOLVER.CLIP_GRAD_NORM 1.0",
    "mean": "shapes_kscl.yaml METHOD.SIMILARITY mean_cosine",
    "high_rho": "shapes_kscl.yaml METHOD.RHO 0.9 SOLVER.GRAD_ACCUM_STEPS 2",
    "bank": "shapes_kscl.yaml DICTIONARY.TYPE memory_bank DICTIONARY.BANK_MOMENTUM 0.5",
    "bank_mean": "shapes_kscl.yaml DICTIONARY.TYPE memory_bank METHOD.SIMILARITY mean_cosine",
    "minibatch": f"shapes_kscl.yaml {SHARED}",
    "through_keys": f"shapes_kscl.yaml {SHARED} METHOD.GRAD_THROUGH_KEYS True METHOD.RHO 0.9",
    "symmetric": f"shapes_kscl.yaml {SHARED} METHOD.SYMMETRIC True METHOD.NUM_SHOTS 2 {SMALL}",
    "simclr": f"shapes_moco.yaml {SHARED} METHOD.SYMMETRIC True METHOD.GRAD_THROUGH_KEYS True "
    "SOLVER.OPTIMIZER lars",
    "queries": f"shapes_kscl.yaml METHOD.NUM_QUERIES 2 {SMALL}",
    "eval_norm": "shapes_kscl.yaml KEY_ENCODER.BATCH_NORM eval AUGMENT moco_v1",
    "recipe": "shapes_moco.yaml AUGMENT simclr BACKBONE.NAME resnet18",
}
CLASSES = "DATA.TRAIN {data}/classes/train DATA.VAL {data}/classes/val"
VOC = "voc:{data}/VOCdevkit/VOC2007:"
ANNOTATED = f"DATA.TRAIN {VOC}trainval DATA.VAL {VOC}test"
SET = "{{train: {data}/classes/train, test: {data}/classes/val}}"
NO_SETS = " ".join(
    f"SETS.{name} {{{{}}}}"
    for name in [
        "aircraft",
        "birdsnap",
        "caltech101",
        "cars",
        "cifar10",
        "cifar100",
        "dtd",
        "flowers",
        "food101",
        "pets",
        "sun397",
        "voc07",
    ]
)
FEW = "SOLVER.EPOCHS 3 SOLVER.BATCH_SIZE 16 SOLVER.MILESTONES [2]"
PROBES = {
    "cached": f"shapes.yaml {CLASSES} SOLVER.EPOCHS 5",
    "lbfgs": f"linear_cached_lbfgs.yaml {CLASSES}",
    "knn": f"shapes_knn.yaml {CLASSES} KNN.K [5,20]",
    "online": f"imagenet_linear_moco.yaml {CLASSES} {FEW}",
    "finetune": f"finetune_imagenet_10percent.yaml {CLASSES} {FEW} DATA.SUBSET '' "
    "DATA.FRACTION 0.5",
    "svm": f"voc07_svm.yaml {ANNOTATED} SVM.COSTS [0.1,1.0]",
    "low_shot": f"voc07_low_shot_svm.yaml {ANNOTATED} LOW_SHOT.K [1,2] LOW_SHOT.SAMPLES 2",
    "linear_suite": f"linear_suite.yaml {NO_SETS} SETS.shapes '{SET}'",
}
DETECTORS = ("c4", "fpn", "retinanet", "mask")
BRIEF = (
    "SOLVER.MAX_ITER 2 SOLVER.STEPS '(1,)' TEST.PRECISE_BN.NUM_ITER 2 SOLVER.WARMUP_ITERS 1 "
    "DATALOADER.NUM_WORKERS 0 SEED 1"
)


def commands(data: Path, out: Path) -> Iterator[tuple[str, str]]:
    """Yield (case, command) in an order in which each can use what those before it made."""
    yield "shapes", f"make_shapes.py --output-dir {data} {SHAPES}"
    for name, words in PRETRAIN.items():
        config, _, overrides = words.partition(" ")
        yield (
            f"pretrain/{name}",
            f"pretrain.py --config-file configs/pretrain/{config} {TINY} "
            f"DATA.TRAIN {data}/unlabeled OUTPUT_DIR {out}/pretrain/{name} {overrides}",
        )
    backbone = out / "pretrain" / "kscl" / "backbone.safetensors"
    for name, words in PROBES.items():
        config, _, overrides = words.format(data=data).partition(" ")
        yield (
            f"probe/{name}",
            f"linear_eval.py --config-file configs/linear_eval/{config} INPUT.SIZE 32 "
            f"INPUT.RESIZE 32 DATA.NUM_WORKERS 0 DATA.CACHE_DIR {out}/cache "
            f"BACKBONE.WEIGHTS {backbone} OUTPUT_DIR {out}/probe/{name} {overrides}",
        )
    voc = f"{data}/VOCdevkit/VOC2007"
    for name in DETECTORS:
        converted = out / "converted" / name
        if name == "mask":
            sets = [
                f"coco:{data}/coco/instances_{s}.json:{voc}/JPEGImages"
                for s in ("trainval", "test")
            ]
        else:
            sets = [f"voc:{voc}:{split}" for split in ("trainval", "test")]
        yield (
            f"convert/{name}",
            f"convert.py {backbone} --protocol configs/detection/shapes_tiny_{name}.yaml "
            f"--output-dir {converted}",
        )
        yield (
            f"detect/{name}",
            f"train_net.py --config-file {converted}/config.yaml {BRIEF} DATASETS.TRAIN "
            f"\"('{sets[0]}',)\" DATASETS.TEST \"('{sets[1]}',)\" OUTPUT_DIR {out}/detect/{name}",
        )


def run(tree: Path, folder: Path, chosen: str) -> None:
    """Run all commands in one tree; raise an error that names the log of one that failed."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    for case, command in commands(folder / "data", folder / "out"):
        needed = case in ("shapes", "pretrain/kscl") or case == f"convert/{Path(chosen).name}"
        if chosen not in case and not needed:
            continue
        log = folder / "logs" / f"{case.replace('/', '-')}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        with log.open("w") as file:
            done = subprocess.run(
                f"{sys.executable} -W ignore tools/{command}",
                shell=True,
                cwd=tree,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        print(f"  {case}: {time.monotonic() - begun:.1f} s", flush=True)
        if done.returncode:
            raise SystemExit(f"{case} failed in {tree}:\n{log.read_text()[-3000:]}")


def numbers(folder: Path) -> dict[str, Any]:
    """Return every number to compare by the file that holds it and its name there."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "backbone.safetensors":
            found |= {f"{name}:{key}": value for key, value in load_file(path).items()}
        elif path.suffix in (".pth", ".pkl") and path.is_file():
            content = torch.load(path, weights_only=True, map_location="cpu")
            tensors = content.get("model", content)
            found |= {f"{name}:{key}": value for key, value in tensors.items()}
        elif path.name.endswith("record.json"):
            metrics = json.loads(path.read_text())["metrics"]
            found |= {f"{name}:{key}": value for key, value in measured(metrics)}
        elif path.name in ("metrics.jsonl", "metrics.json"):
            for number, line in enumerate(path.read_text().splitlines()):
                found |= {f"{name}:{number}:{k}": v for k, v in measured(json.loads(line))}
        elif path.is_file() and path.parts[-2] in ("unlabeled", "JPEGImages", "Annotations"):
            found[name] = path.read_bytes()
    return found


def measured(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a row that are results, not measurements of time."""
    for name, value in row.items():
        if not any(part in name for part in NOT_COMPARED):
            yield name, value


def equal(one: Any, other: Any) -> bool:
    """Return whether two numbers are the same to the bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other or (one != one and other != other))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", default="", help="cases whose name contains this, e.g. probe/knn")
    parser.add_argument("--keep", type=Path, help="keep both runs in this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        before = folder / "tree"
        git = ["git", "-C", str(ROOT)]
        subprocess.run(
            [*git, "worktree", "add", "-q", "--detach", before, arguments.base], check=True
        )
        try:
            for name, tree in (("before", before), ("now", ROOT)):
                print(f"{name}: {tree}")
                run(tree, folder / name, arguments.only)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", before], check=True)
        old, new = (numbers(folder / name) for name in ("before", "now"))
    names = [name for name in old if name in new]
    differing = [name for name in names if not equal(old[name], new[name])]
    missing = sorted(old.keys() ^ new.keys())
    for name in differing[:40]:
        values = (
            "" if isinstance(old[name], torch.Tensor | bytes) else f": {old[name]} → {new[name]}"
        )
        print(f"differs: {name}{values}")
    for name in missing[:40]:
        print(f"only {'before' if name in old else 'now'}: {name}")
    print(f"{len(names)} compared, {len(differing)} differ, {len(missing)} are in one tree only.")
    return 1 if differing or missing or not names else 0


if __name__ == "__main__":
    sys.exit(main())
