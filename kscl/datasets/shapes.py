"""A drawn data set of textured shapes, the same to the byte on every machine.

20 classes, each a pair of form and texture: unlabeled pictures to pretrain on, class folders for
the linear probe, and crowded scenes for detection, in the layout of PASCAL VOC 2007 and as COCO
files with masks. VOC's difficult objects are crowds in COCO, with run lengths as masks: scorers
ignore both. segmentation/ has the same scenes with masks of class numbers; difficult objects are
255 (ignored).
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import signal
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kscl.data.annotated.voc import Tags, annotation_tags, read_voc, to_xml
from kscl.data.annotations import AnnotatedImage, AnnotatedObject
from kscl.data.masks import palette, run_lengths
from kscl.datasets.drawing import (
    CLASS_NAMES,
    Chance,
    Picture,
    Pixels,
    SceneObject,
    draw_portrait,
    draw_scene,
)
from kscl.errors import KsclError
from kscl.runtime.files import only_run_in, sha256_of, write_atomically
from kscl.runtime.logs import progress

VOC = "VOCdevkit/VOC2007"
SEGMENTATION = "segmentation"
MANIFEST = "shapes.json"  # written last
UNFINISHED = "shapes.unfinished.json"  # its name while the folder is being filled
GENERATOR_VERSION = 1  # raise it with every change of a pixel or a box
# The folders that each hash of the manifest covers.
DIGESTS = {
    "sha256": ("unlabeled", "classes", "VOCdevkit"),
    "coco_sha256": ("coco",),
    "segmentation_sha256": (SEGMENTATION,),
}
# One random stream per part of the set; the numbers are part of the data set's identity.
_STREAMS = {"unlabeled": 0, "train": 1, "val": 2, "trainval": 3, "test": 4}
_PLANNING = 16  # added to a part's stream: which classes its scenes show
_DRAWINGS_PER_BATCH = 16
_MOST_IMAGES = 999_999  # VOC's names have six digits


def _setting(default: int, about: str, low: int, high: int) -> Any:
    return field(default=default, metadata={"about": about, "range": (low, high)})


@dataclass(frozen=True)
class ShapesSettings:
    """Everything the pixels depend on; counts are pictures in total, not per class."""

    # The random streams are keyed by 32-bit words.
    seed: int = _setting(0, "seed: each of 2^32 gives another data set", 0, 2**32 - 1)
    num_classes: int = _setting(
        len(CLASS_NAMES), "the first N of the classes below", 1, len(CLASS_NAMES)
    )
    unlabeled: int = _setting(5000, "pictures to pretrain on", 1, _MOST_IMAGES)
    train: int = _setting(
        2000, "labeled pictures to train the probe on, all classes together", 1, _MOST_IMAGES
    )
    val: int = _setting(1000, "labeled pictures to score it on", 1, _MOST_IMAGES)
    detection_train: int = _setting(
        400, "scenes in VOC's trainval; every fourth is val, the others train", 1, _MOST_IMAGES // 2
    )
    detection_test: int = _setting(200, "scenes in VOC's test", 1, _MOST_IMAGES // 2)
    image_size: int = _setting(
        96, "side of the unlabeled and labeled pictures, in pixels", 32, 4096
    )
    detection_size: int = _setting(160, "shorter side of the scenes, in pixels", 64, 4096)
    min_objects: int = _setting(5, "fewest objects in a scene", 1, 50)
    max_objects: int = _setting(9, "most objects in a scene", 1, 50)

    @property
    def class_names(self) -> tuple[str, ...]:
        return CLASS_NAMES[: self.num_classes]

    def check(self) -> None:
        """Raise one error that lists everything that is wrong."""
        ranges = {each.name: each.metadata["range"] for each in fields(self)}
        ranges["max_objects"] = (self.min_objects, ranges["max_objects"][1])
        wrong = [
            f"{name} must be {low} to {high}, got {getattr(self, name)}."
            for name, (low, high) in ranges.items()
            if not low <= getattr(self, name) <= high
        ]
        # A score over a split without some classes would mean nothing.
        objects = {"train": 1, "val": 1}
        objects |= dict.fromkeys(("detection_train", "detection_test"), self.min_objects)
        wrong = wrong or [
            f"{name} shows {getattr(self, name) * each} objects for {self.num_classes} classes; "
            "ask for more pictures or a smaller num_classes."
            for name, each in objects.items()
            if getattr(self, name) * each < self.num_classes
        ]
        if wrong:
            raise KsclError("This data set cannot be drawn:\n  " + "\n  ".join(wrong))

    def identity(self) -> dict[str, Any]:
        """Return what identifies the data set, in its manifest."""
        return {
            "format": "kscl-shapes",
            "generator_version": GENERATOR_VERSION,
            **asdict(self),
            "classes": list(self.class_names),
        }


@dataclass(frozen=True)
class Drawing:
    """One picture to draw; it depends on nothing else, so workers can draw in any order."""

    part: str
    index: int
    name: str  # the path of a portrait, the six digits of a scene
    labels: tuple[int, ...]

    @property
    def is_scene(self) -> bool:
        """Whether it shows several annotated objects."""
        return self.part in ("trainval", "test")

    @property
    def paths(self) -> list[str]:
        """The files to write, the picture first."""
        if not self.is_scene:
            return [self.name]
        return [
            f"{VOC}/JPEGImages/{self.name}.jpg",
            f"{VOC}/Annotations/{self.name}.xml",
            f"{SEGMENTATION}/{self.part}/images/{self.name}.jpg",
            f"{SEGMENTATION}/{self.part}/masks/{self.name}.png",
        ]


def plan(settings: ShapesSettings) -> list[Drawing]:
    """List every picture of the data set."""
    drawings = []
    for part in ("unlabeled", "train", "val"):
        for index in range(getattr(settings, part)):
            label = index % settings.num_classes
            in_class = f"classes/{part}/{settings.class_names[label]}"
            folder = part if part == "unlabeled" else in_class
            drawings.append(Drawing(part, index, f"{folder}/{index:06d}.jpg", (label,)))
    first = 1
    for part, count in (("trainval", settings.detection_train), ("test", settings.detection_test)):
        for index, labels in enumerate(_casts(settings, part, count)):
            drawings.append(Drawing(part, index, f"{first + index:06d}", labels))
        first += count
    return drawings


def _casts(settings: ShapesSettings, part: str, count: int) -> list[tuple[int, ...]]:
    """Deal the labels of each scene from shuffled decks, so that classes are equally frequent."""
    chance = Chance(settings.seed, _PLANNING + _STREAMS[part], 0)
    deck: list[int] = []
    casts = []
    for _ in range(count):
        size = chance.integer(settings.min_objects, settings.max_objects)
        while len(deck) < size:
            deck += chance.shuffled(range(settings.num_classes))
        casts.append(tuple(deck[:size]))
        deck = deck[size:]
    return casts


def draw(drawing: Drawing, settings: ShapesSettings) -> tuple[Picture, tuple[SceneObject, ...]]:
    """Draw one entry of the plan, with its annotated objects if it is a scene."""
    chance = Chance(settings.seed, _STREAMS[drawing.part], drawing.index)
    if drawing.is_scene:
        return draw_scene(drawing.labels, settings.detection_size, chance)
    return draw_portrait(drawing.labels[0], settings.image_size, chance), ()


def find_shapes(folder: Path, settings: ShapesSettings) -> dict[str, Any] | None:
    """Return the manifest if the folder holds this whole data set, or None.

    Raise KsclError if it holds anything else.
    """
    settings.check()
    with _explained(folder):
        # Hidden files are the lock and what a killed process left.
        if not folder.exists() or (
            folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())
        ):
            return None
        name = next((name for name in (MANIFEST, UNFINISHED) if (folder / name).is_file()), None)
        if name is None:
            raise KsclError(
                f"{folder} already holds something else ({MANIFEST} is missing). Choose another "
                "output folder."
            )
        found = read_manifest(folder, name)
        changes = [
            f"{key} is {found.get(key)!r}, but {value!r} was requested"
            for key, value in settings.identity().items()
            if found.get(key) != value and key != "classes"
        ]
        if changes:
            raise KsclError(
                f"{folder} holds another data set of this kind: {'; '.join(changes)}. "
                "Choose another output folder, or delete this one."
            )
        wanted = [path for drawing in plan(settings) for path in drawing.paths]
        wanted += _lists([], settings.class_names)
        complete = name == MANIFEST and all((folder / path).is_file() for path in wanted)
        return found if complete else None


def make_shapes(folder: Path, settings: ShapesSettings, workers: int = 1) -> dict[str, Any]:
    """Draw the data set into the folder unless it is there already; return its manifest."""
    if workers < 1:
        raise KsclError(f"workers must be at least 1, got {workers}.")
    if (found := find_shapes(folder, settings)) is not None:
        return found
    with _explained(folder), only_run_in(folder, "--output-dir"):
        return find_shapes(folder, settings) or _fill(folder, settings, workers)


def verify_shapes(folder: Path) -> None:
    """Hash every file again; raise KsclError unless all are as the manifest says."""
    manifest = read_manifest(folder)
    with _explained(folder):
        for key, parts in DIGESTS.items():
            files = [p for part in parts for p in (folder / part).rglob("*") if p.is_file()]
            hashes = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
            if _digest(hashes) != manifest.get(key):
                raise KsclError(
                    f"{folder} is damaged: its {len(hashes)} files in {', '.join(parts)} do not "
                    f"match {MANIFEST}. Delete the folder and draw it again."
                )


def read_manifest(folder: Path, name: str = MANIFEST) -> dict[str, Any]:
    """Return the content of a folder's manifest."""
    path = folder / name
    if not path.is_file():
        raise KsclError(f"{folder} holds no finished data set: {name} is missing. Run kscl shapes.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise KsclError(f"{path} is not a manifest ({error}). Delete its folder.") from error
    return content


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise a KsclError that says what to do about a disk or worker that fails."""
    try:
        yield
    except OSError as error:
        raise KsclError(
            f"{error.filename or folder} cannot be used: {error.strerror}. "
            "Choose an output folder that you may write to, on a disk with room."
        ) from error
    except BrokenProcessPool as error:
        raise KsclError(
            "A worker was killed, perhaps out of memory. Run the command again with fewer workers."
        ) from error


def _digest(hashes: Mapping[str, str]) -> str:
    """Return one SHA-256 over all files: that of `sha256sum`'s lines, sorted by path."""
    lines = "".join(f"{hashes[path]}  {path}\n" for path in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True)
class Written:
    """A picture that was drawn and saved."""

    drawing: Drawing
    hashes: dict[str, str]  # of each file, by path
    width: int
    height: int
    objects: list[dict[str, Any]]  # as COCO files have them, without their ids


def _fill(folder: Path, settings: ShapesSettings, workers: int) -> dict[str, Any]:
    # Draw again what an interrupted run left: its last file may be incomplete.
    manifest = settings.identity()
    _write_json(folder / UNFINISHED, manifest)
    (folder / MANIFEST).unlink(missing_ok=True)
    drawings = plan(settings)
    hashes: dict[str, str] = {}
    scenes = []
    for written in progress(_written(folder, settings, drawings, workers), "Drawn", len(drawings)):
        hashes |= written.hashes
        if written.drawing.is_scene:
            scenes.append(written)
    lists = _lists(scenes, settings.class_names)
    hashes |= _save(folder, {path: text.encode() for path, text in lists.items()})
    manifest["files"] = len(hashes)
    for key, parts in DIGESTS.items():
        manifest[key] = _digest({p: h for p, h in hashes.items() if p.split("/")[0] in parts})
    _write_json(folder / MANIFEST, manifest)
    (folder / UNFINISHED).unlink()
    return manifest


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _written(
    folder: Path, settings: ShapesSettings, drawings: Sequence[Drawing], workers: int
) -> Iterator[Written]:
    """Yield the results in the order of the plan."""
    draw_one = partial(_draw_and_save, folder, settings)
    if workers == 1:
        yield from map(draw_one, drawings)
        return
    # Spawned, as the caller may have threads running. Only this process handles Ctrl-C.
    context = multiprocessing.get_context("spawn")
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, context, signal.signal, ignore) as pool:
        yield from pool.map(draw_one, drawings, chunksize=_DRAWINGS_PER_BATCH)


def _draw_and_save(folder: Path, settings: ShapesSettings, drawing: Drawing) -> Written:
    picture, objects = draw(drawing, settings)
    height, width, _ = picture.shape
    jpeg = io.BytesIO()
    # The integer transform of libjpeg-turbo is bit-exact on all its code paths.
    Image.fromarray(picture).save(
        jpeg, "JPEG", quality=90, subsampling="4:2:0", optimize=False, progressive=False
    )
    contents = [jpeg.getvalue()]
    if drawing.is_scene:
        annotation = _voc_annotation(drawing.name, width, height, objects)
        contents += [annotation, contents[0], _class_mask(height, width, objects)]
    hashes = _save(folder, dict(zip(drawing.paths, contents, strict=True)))
    return Written(drawing, hashes, width, height, [_coco_object(each) for each in objects])


def _save(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def _voc_annotation(name: str, width: int, height: int, objects: Sequence[SceneObject]) -> bytes:
    """Return the XML of one scene, with the tags of the VOC 2007 development kit."""
    things = [
        AnnotatedObject(
            CLASS_NAMES[each.label],
            (each.box[0] - 1, each.box[1] - 1, each.box[2], each.box[3]),
            each.difficult,
            each.truncated,
        )
        for each in objects
    ]
    filename, size, *tags = annotation_tags(f"{name}.jpg", (width, height), things)
    source: Tags = [("database", "KSCL shapes"), ("annotation", "KSCL shapes"), ("image", "drawn")]
    head: Tags = [("folder", "VOC2007"), filename, ("source", source), size, ("segmented", "0")]
    return to_xml(head + tags)


def _class_mask(height: int, width: int, objects: Sequence[SceneObject]) -> bytes:
    """Return a PNG of class numbers: 0 is the background, 255 a difficult object."""
    numbers = np.zeros((height, width), np.uint8)
    for each in objects:
        numbers[each.shows] = 255 if each.difficult else each.label + 1
    mask, png = Image.fromarray(numbers), io.BytesIO()
    mask.putpalette(palette().tobytes())
    # Z_RLE: another zlib might find other matches, and so other bytes.
    mask.save(png, "PNG", compress_type=zlib.Z_RLE)
    return png.getvalue()


def _coco_object(each: SceneObject) -> dict[str, Any]:
    xmin, ymin, xmax, ymax = each.box
    if each.difficult:
        counts = run_lengths(each.shows).counts.tolist()
        segmentation: Any = {"size": list(each.shows.shape), "counts": counts}
    else:
        segmentation = polygons_of(each.shows[ymin - 1 : ymax, xmin - 1 : xmax], xmin - 1, ymin - 1)
    return {
        "category_id": each.label + 1,
        "bbox": [xmin - 1, ymin - 1, xmax - xmin + 1, ymax - ymin + 1],
        "area": int(np.count_nonzero(each.shows)),
        "iscrowd": int(each.difficult),
        "segmentation": segmentation,
    }


def _lists(scenes: Sequence[Written], class_names: Sequence[str]) -> dict[str, str]:
    """Return path and text of VOC's lists and of the COCO files."""
    trainval = [each for each in scenes if each.drawing.part == "trainval"]
    splits = {
        "train": [each for index, each in enumerate(trainval) if index % 4 != 1],
        "val": trainval[1::4],  # to choose settings on
        "trainval": trainval,
        "test": [each for each in scenes if each.drawing.part == "test"],
    }
    numbered = "\n".join(["background", *class_names, ""])
    files = {f"{SEGMENTATION}/{part}/masks/classes.txt": numbered for part in ("trainval", "test")}
    for split, members in splits.items():
        names = "".join(f"{each.drawing.name}\n" for each in members)
        files[f"{VOC}/ImageSets/Main/{split}.txt"] = names
        for label, name in enumerate(class_names):
            files[f"{VOC}/ImageSets/Main/{name}_{split}.txt"] = "".join(
                f"{each.drawing.name} {_presence(each, label):2d}\n" for each in members
            )
        files[f"coco/instances_{split}.json"] = _coco_file(members, class_names)
    return files


def _presence(scene: Written, label: int) -> int:
    """Return 1 if the class is there, 0 if only as a difficult object, -1 if not."""
    found = [each["iscrowd"] for each in scene.objects if each["category_id"] == label + 1]
    return -1 if not found else int(not all(found))


def _coco_file(scenes: Sequence[Written], class_names: Sequence[str]) -> str:
    objects = [(int(scene.drawing.name), each) for scene in scenes for each in scene.objects]
    content = {
        "info": {"description": "KSCL shapes"},
        "images": [
            {
                "id": int(scene.drawing.name),
                "file_name": f"{scene.drawing.name}.jpg",
                "width": scene.width,
                "height": scene.height,
            }
            for scene in scenes
        ],
        "categories": [{"id": label + 1, "name": name} for label, name in enumerate(class_names)],
        "annotations": [
            {"id": number, "image_id": image_id, **each}
            for number, (image_id, each) in enumerate(objects, start=1)
        ],
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


Vertex = tuple[int, int]  # x, y of a corner of pixels; or a direction


def polygons_of(mask: Pixels, left: int = 0, top: int = 0) -> list[list[int]]:
    """Return polygons [x1, y1, x2, y2, …] that cover exactly the pixels of the mask.

    COCO's polygons have no holes, so a mask with a hole is cut in two through it. (`left`, `top`)
    is the mask's corner in its picture.
    """
    loops = _loops(mask)
    for loop in loops:
        following = loop[1:] + loop[:1]
        if sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(loop, following, strict=True)) < 0:
            cut = min(x for x, _ in loop) + 1  # a hole runs the other way round
            first = polygons_of(mask[:, :cut], left, top)
            return first + polygons_of(mask[:, cut:], left + cut, top)
    return [[value for x, y in loop for value in (x + left, y + top)] for loop in loops]


def _loops(mask: Pixels) -> list[list[Vertex]]:
    """Return the corners of all outlines; the mask is on their right."""
    edges = _edges(mask)
    loops = []
    while edges:
        start = vertex = min(edges)
        dx, dy = min(edges[start])
        loop: list[Vertex] = []
        while not loop or vertex != start:
            # The sharpest right turn first: it keeps to the pixel on its right.
            turns = (-dy, dx), (dx, dy), (dy, -dx)
            turn = next(each for each in turns if each in edges[vertex])
            if turn != (dx, dy) or not loop:
                loop.append(vertex)
            edges[vertex].remove(turn)
            if not edges[vertex]:
                del edges[vertex]
            dx, dy = turn
            vertex = (vertex[0] + dx, vertex[1] + dy)
        loops.append(loop)
    return loops


def _edges(mask: Pixels) -> dict[Vertex, set[Vertex]]:
    """Return the directions of the edges at each corner, clockwise around the pixels."""
    height, width = mask.shape
    padded = np.pad(mask, 1)
    edges: dict[Vertex, set[Vertex]] = {}
    for (dx, dy), (right, down) in (
        ((1, 0), (0, 0)),  # along the top of a pixel, from its upper left corner
        ((0, 1), (1, 0)),
        ((-1, 0), (1, 1)),
        ((0, -1), (0, 1)),
    ):
        beside = padded[1 - dx : 1 - dx + height, 1 + dy : 1 + dy + width]  # on the edge's left
        for y, x in np.argwhere(mask & ~beside).tolist():
            edges.setdefault((x + right, y + down), set()).add((dx, dy))
    return edges


_PAPER, _INK, _FAINT = (250, 249, 246), (38, 38, 42), (120, 118, 112)
_PLAIN, _TRUNCATED, _DIFFICULT = (94, 232, 129), (255, 208, 64), (255, 92, 92)
_CROP, _GAP, _MARGIN, _NAME_WIDTH = 58, 4, 22, 128
_CROPS, _SCENES = 4, 4


def draw_contact_sheet(folder: Path, path: Path) -> None:
    """Draw crops of each class in two columns, and below them some scenes with their boxes."""
    classes = read_manifest(folder)["classes"]
    rows = -(-len(classes) // 2)
    column = _NAME_WIDTH + _CROPS * (_CROP + _GAP)
    width = 2 * column + 3 * _MARGIN - 2 * _GAP
    scenes_top = _MARGIN + rows * (_CROP + _GAP) + 40
    scene_side = (width - 2 * _MARGIN - (_SCENES - 1) * _GAP * 2) // _SCENES
    sheet = Image.new("RGB", (width, scenes_top + scene_side + _MARGIN), _PAPER)
    pen = ImageDraw.Draw(sheet)
    name_font, font = ImageFont.load_default(14), ImageFont.load_default(13)
    for index, name in enumerate(classes):
        left = _MARGIN + (index // rows) * (column + _MARGIN - _GAP)
        top = _MARGIN + (index % rows) * (_CROP + _GAP)
        pen.text((left, top + _CROP // 2), name, fill=_INK, font=name_font, anchor="lm")
        crops = sorted((folder / "classes/train" / name).glob("*.jpg"))[:_CROPS]
        for place, file in enumerate(crops):
            crop = _resized(file, (_CROP, _CROP))
            sheet.paste(crop, (left + _NAME_WIDTH + place * (_CROP + _GAP), top))
    left, top = _MARGIN, scenes_top - 26
    pen.text((left, top + 7), "Detection scenes", fill=_INK, font=name_font, anchor="lm")
    left += _NAME_WIDTH
    for color, meaning in (
        (_PLAIN, "object"),
        (_TRUNCATED, "truncated by the border"),
        (_DIFFICULT, "difficult: tiny, or largely hidden"),
    ):
        pen.rectangle((left, top + 1, left + 12, top + 13), outline=color, width=3)
        pen.text((left + 19, top + 7), meaning, fill=_FAINT, font=font, anchor="lm")
        left += 40 + int(pen.textlength(meaning, font=font))
    images = read_voc(folder / VOC, "trainval", classes).checked().images
    # Square scenes fill their cell of the sheet.
    square_first = sorted(images[: 8 * _SCENES], key=lambda image: image.width != image.height)
    for place, image in enumerate(square_first[:_SCENES]):
        left = _MARGIN + place * (scene_side + 2 * _GAP)
        sheet.paste(_with_boxes(image, scene_side), (left, scenes_top))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    write_atomically(path, buffer.getvalue())


def _resized(file: Path, size: tuple[int, int]) -> Image.Image:
    with Image.open(file) as picture:
        return picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _with_boxes(image: AnnotatedImage, side: int) -> Image.Image:
    assert image.path is not None
    scale = side / max(image.width, image.height)
    scene = _resized(image.path, (round(image.width * scale), round(image.height * scale)))
    pen = ImageDraw.Draw(scene)
    for each in image.objects:
        x1, y1, x2, y2 = (value * scale for value in each.box)
        color = _DIFFICULT if each.difficult else _TRUNCATED if each.truncated else _PLAIN
        pen.rectangle((x1, y1, x2 - 1, y2 - 1), outline=color, width=2)
    return scene
