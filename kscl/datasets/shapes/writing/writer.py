"""Draw every picture of the plan into a folder, in one process or several."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from kscl.datasets.shapes.plan import Drawing, plan
from kscl.datasets.shapes.scene import Picture, Scene, SceneObject, draw_portrait, draw_scene
from kscl.datasets.shapes.settings import ShapesSettings, check
from kscl.datasets.shapes.writing import coco, manifest, voc
from kscl.errors import KsclError
from kscl.runtime.folder_lock import only_run_in

_DRAWINGS_PER_BATCH = 16


@dataclass(frozen=True)
class Written:
    """A picture that was drawn and saved."""

    drawing: Drawing
    hashes: dict[str, str]  # of each file, by path
    scene: Scene


Watch = Callable[[Iterator[Written], int], Iterable[Written]]


def find_shapes(output: str | Path, settings: ShapesSettings) -> dict[str, Any] | None:
    """Return the manifest of a folder that holds this data set with all its files, or None.

    A folder that holds anything else is an error.
    """
    folder = Path(output)
    check(settings)
    with _explaining(folder):
        if not manifest.is_finished(folder, settings):
            return None
        wanted = [path for drawing in plan(settings) for path in _paths(drawing)]
        wanted += [*voc.image_set_paths(settings.class_names), *coco.file_paths()]
        if not all((folder / path).is_file() for path in wanted):
            return None
        return manifest.read_manifest(folder)


def make_shapes(
    output: str | Path,
    settings: ShapesSettings | None = None,
    workers: int = 1,
    watch: Watch = lambda results, total: results,
) -> dict[str, Any]:
    """Draw the data set into `output` unless it is there already; return its manifest.

    `watch` sees the results pass by, for a progress bar.
    """
    folder, settings = Path(output), settings or ShapesSettings()
    if workers < 1:
        raise KsclError(f"workers is {workers}: use 1 or more.")
    found = find_shapes(folder, settings)
    if found is not None:
        return found
    with _explaining(folder), only_run_in(folder, "--output-dir"):
        return find_shapes(folder, settings) or _fill(folder, settings, workers, watch)


def verify_shapes(output: str | Path) -> dict[str, Any]:
    """Read every file again; raise unless they are, to the byte, what the manifest says."""
    folder = Path(output)
    content = manifest.read_manifest(folder)
    with _explaining(folder):
        for key, parts in manifest.DIGESTS.items():
            hashes = {
                path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for part in parts
                for path in (folder / part).rglob("*")
                if path.is_file()
            }
            if manifest.digest(hashes) != content.get(key):
                raise KsclError(
                    f"{folder} is damaged: its {len(hashes)} files in {', '.join(parts)} are not "
                    f"those that {manifest.MANIFEST} describes. Delete the folder "
                    "and draw it again."
                )
    return content


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """Turn what the machine refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise KsclError(
            f"{error.filename or folder} cannot be used: {error.strerror}. "
            "Choose an output folder that you may write to, on a disk with room."
        ) from error
    except BrokenProcessPool as error:
        raise KsclError(
            "A worker process was killed, perhaps because memory ran out. "
            "Run the same command again with fewer workers."
        ) from error


def _fill(folder: Path, settings: ShapesSettings, workers: int, watch: Watch) -> dict[str, Any]:
    # What an interrupted run left is drawn again: its last file may be incomplete.
    manifest.begin(folder, settings)
    drawings = plan(settings)
    hashes: dict[str, str] = {}
    scenes: dict[str, dict[str, Scene]] = {"trainval": {}, "test": {}}
    for written in watch(_written(folder, settings, drawings, workers), len(drawings)):
        hashes.update(written.hashes)
        if written.drawing.is_scene:
            scenes[written.drawing.part][written.drawing.name] = written.scene
    parts = scenes["trainval"], scenes["test"], settings.class_names
    texts = voc.image_sets(*parts) | coco.files(*parts)
    hashes.update(_save(folder, {path: text.encode() for path, text in texts.items()}))
    return manifest.finish(folder, settings, hashes)


def _written(
    folder: Path, settings: ShapesSettings, drawings: Sequence[Drawing], workers: int
) -> Iterator[Written]:
    """Yield the results in the order of the plan, whichever worker draws them."""
    draw_one = partial(_draw_and_save, folder, settings)
    if workers == 1:
        yield from map(draw_one, drawings)
        return
    # Spawned, not forked: the caller may have threads running.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_leave_interrupts) as pool:
        yield from pool.map(draw_one, drawings, chunksize=_DRAWINGS_PER_BATCH)


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that started the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _paths(drawing: Drawing) -> list[str]:
    if drawing.is_scene:
        return [voc.picture_path(drawing.name), voc.annotation_path(drawing.name)]
    return [drawing.name]


def _draw_and_save(folder: Path, settings: ShapesSettings, drawing: Drawing) -> Written:
    picture, objects = draw(drawing, settings)
    files = {_paths(drawing)[0]: _jpeg(picture)}
    height, width, _ = picture.shape
    scene = Scene(width, height, objects)
    if drawing.is_scene:
        text = voc.annotation(drawing.name, scene, settings.class_names)
        files[voc.annotation_path(drawing.name)] = text.encode()
    return Written(drawing, _save(folder, files), scene)


def draw(drawing: Drawing, settings: ShapesSettings) -> tuple[Picture, tuple[SceneObject, ...]]:
    """Draw the picture of one entry of the plan, with its annotated objects if it is a scene."""
    chance = drawing.chance(settings.seed)
    if drawing.is_scene:
        return draw_scene(drawing.labels, settings.detection_size, chance)
    return draw_portrait(drawing.labels[0], settings.image_size, chance), ()


def _jpeg(picture: Picture) -> bytes:
    """Encode with the integer transform of libjpeg-turbo, bit-exact on all its code paths."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(
        buffer, "JPEG", quality=90, subsampling="4:2:0", optimize=False, progressive=False
    )
    return buffer.getvalue()


def _save(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
