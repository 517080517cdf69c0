"""Images in one folder per class, split for a probe: links in classes/train and classes/val."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from kscl.data.annotated.annotations import Problem, list_problems
from kscl.data.annotated.image_size import image_size
from kscl.data.formats import is_image
from kscl.data.walk import Walk, walk_files
from kscl.datasets.own.case import unite_case
from kscl.datasets.own.files import make_ids
from kscl.datasets.own.near_duplicates import find_groups
from kscl.datasets.own.problems import refuse_problems
from kscl.datasets.own.split import deal_groups, parse_split
from kscl.datasets.own.write import is_written, link, refuse_inside, write_about
from kscl.errors import KsclError
from kscl.runtime.files import whole_folder

SIDES = ("train", "val")


def prepare_class_folders(
    images: Path,
    output_dir: Path,
    split: str,
    seed: int = 0,
    skip_bad: bool = False,
    merge_case: bool | None = None,
) -> str:
    """Write links to the images of every class; return the report."""
    fractions = parse_split(split)
    refuse_inside(output_dir, images)
    by_class, undecided = _unite(_by_class(images), merge_case)
    problems, bad = [], set()
    for path in [path for paths in by_class.values() for path in paths]:
        try:
            image_size(path, decode=True)
        except KsclError as error:
            problems.append(Problem("unreadable image", str(path), str(error), "Replace it"))
            bad.add(path)
    refuse_problems([*undecided, *problems], skip_bad)
    label = {path: name for name, paths in by_class.items() for path in paths if path not in bad}
    paths = sorted(label)
    groups = find_groups(paths)
    sides = deal_groups([[[label[paths[i]]] for i in group] for group in groups], fractions, seed)
    side_of = {paths[i]: SIDES[s] for group, s in zip(groups, sides, strict=True) for i in group}
    rows = [
        [name, *(sum(side_of.get(path) == side for path in found) for side in SIDES)]
        for name, found in by_class.items()
    ]
    short = [str(row[0]) for row in rows if not all(row[1:])]
    if short:
        raise KsclError(
            f"Class folders of {images} with too few different images for both sides of the split: "
            f"{', '.join(short)}. Add images, or remove the folders."
        )
    table = tabulate(rows, ["class", *SIDES])
    text = f"{len(paths):,} images in {len(by_class)} classes.\n{table}"
    if bad:
        text += f"\nLeft out because of problems (--skip-bad):\n{list_problems(problems)}"
    about = _about(images, split, seed, label)
    if is_written(output_dir, about):
        return f"{text}\n{output_dir} is there already, made from the same files."
    ids = make_ids(paths, images)
    with whole_folder(output_dir) as folder:
        for path, side in side_of.items():
            place = folder / "classes" / side / label[path] / f"{ids[path]}{path.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            link(path, place)
        write_about(folder, about, text)
    return text


def _by_class(images: Path) -> dict[str, list[Path]]:
    if not images.is_dir():
        raise KsclError(f"{images} is not a folder. Check --images.")
    found: dict[str, list[Path]] = defaultdict(list)
    for name, entry in walk_files(str(images), Walk()):
        if is_image(name):
            found[name.split("/", 1)[0] if "/" in name else ""].append(Path(entry.path))
    if "" in found or len(found) < 2:
        raise KsclError(
            f"{images} does not have one folder per class, with all images inside them. Give "
            "--annotations for boxes, or sort the images into folders; unlabeled images alone can "
            "be pretrained on (tools/pretrain.py) but not compared."
        )
    return dict(sorted(found.items()))


def _unite(
    by_class: dict[str, list[Path]], merge: bool | None
) -> tuple[dict[str, list[Path]], list[Problem]]:
    """Return the images of folders whose names differ only by case as the user decided."""
    counts = Counter({name: len(paths) for name, paths in by_class.items()})
    new, problems = unite_case(counts, merge, "image", lambda name: str(by_class[name][0]))
    united: dict[str, list[Path]] = defaultdict(list)
    for name, paths in by_class.items():
        united[new.get(name, name)] += paths
    return dict(sorted(united.items())), problems


def _about(images: Path, split: str, seed: int, label: dict[Path, str]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for path, name in sorted(label.items()):
        digest.update(f"{name} {path.name} {path.stat().st_size}\n".encode())
    return {
        "images": str(images.resolve()),
        "format": "class folders",
        "split": split,
        "seed": seed,
        "classes": sorted(set(label.values())),
        "content": digest.hexdigest()[:16],
    }
