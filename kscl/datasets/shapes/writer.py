"""From settings to a folder full of files, by one process or many."""

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

from kscl.datasets.shapes import coco, manifest, voc
from kscl.datasets.shapes.plan import Job, plan
from kscl.datasets.shapes.scene import Picture, Scene, SceneObject, draw_portrait, draw_scene
from kscl.datasets.shapes.settings import ShapesSettings, check
from kscl.errors import KsclError

_JOBS_A_BATCH = 16


@dataclass(frozen=True)
class Written:
    job: Job
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
        wanted = [path for job in plan(settings) for path in _paths(job)]
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
    """Fill `output` with the data set, unless it is there already; returns its manifest.

    `watch` sees the results pass by, for a progress bar.
    """
    folder, settings = Path(output), settings or ShapesSettings()
    if workers < 1:
        raise KsclError(f"workers is {workers}; it has to be 1 or more")
    with _explaining(folder):
        return find_shapes(folder, settings) or _fill(folder, settings, workers, watch)


def verify_shapes(output: str | Path) -> dict[str, Any]:
    """Read every file again; raises unless they are, to the byte, what the manifest says."""
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
                    f"those that {manifest.MANIFEST} describes; delete the folder and draw it again"
                )
    return content


@contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """Turn what the machine refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise KsclError(
            f"cannot use {error.filename or folder}: {error.strerror}; "
            "choose an output folder that you may write to, on a disk with room"
        ) from error
    except BrokenProcessPool as error:
        raise KsclError(
            "a worker process was killed, perhaps for want of memory; "
            "run the same command again with fewer workers"
        ) from error


def _fill(folder: Path, settings: ShapesSettings, workers: int, watch: Watch) -> dict[str, Any]:
    # Whatever an interrupted run left is drawn again: it may end in half a file.
    manifest.begin(folder, settings)
    jobs = plan(settings)
    hashes: dict[str, str] = {}
    scenes: dict[str, dict[str, Scene]] = {"trainval": {}, "test": {}}
    for written in watch(_written(folder, settings, jobs, workers), len(jobs)):
        hashes.update(written.hashes)
        if written.job.is_scene:
            scenes[written.job.part][written.job.name] = written.scene
    parts = scenes["trainval"], scenes["test"], settings.class_names
    texts = voc.image_sets(*parts) | coco.files(*parts)
    hashes.update(_save(folder, {path: text.encode() for path, text in texts.items()}))
    return manifest.finish(folder, settings, hashes)


def _written(
    folder: Path, settings: ShapesSettings, jobs: Sequence[Job], workers: int
) -> Iterator[Written]:
    """Yield the results in the order of the jobs, whoever draws them."""
    draw_one = partial(_draw_and_save, folder, settings)
    if workers == 1:
        yield from map(draw_one, jobs)
        return
    # Spawned, not forked: the caller may have threads running.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_leave_interrupts) as pool:
        yield from pool.map(draw_one, jobs, chunksize=_JOBS_A_BATCH)


def _leave_interrupts() -> None:
    """Ctrl-C is answered once, by the process that started the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _paths(job: Job) -> list[str]:
    if job.is_scene:
        return [voc.picture_path(job.name), voc.annotation_path(job.name)]
    return [job.name]


def _draw_and_save(folder: Path, settings: ShapesSettings, job: Job) -> Written:
    picture, objects = draw(job, settings)
    files = {_paths(job)[0]: _jpeg(picture)}
    height, width, _ = picture.shape
    scene = Scene(width, height, objects)
    if job.is_scene:
        text = voc.annotation(job.name, scene, settings.class_names)
        files[voc.annotation_path(job.name)] = text.encode()
    return Written(job, _save(folder, files), scene)


def draw(job: Job, settings: ShapesSettings) -> tuple[Picture, tuple[SceneObject, ...]]:
    """Draw the picture of one entry of the plan, with its annotated objects if it is a scene."""
    chance = job.chance(settings.seed)
    if job.is_scene:
        return draw_scene(job.labels, settings.detection_size, chance)
    return draw_portrait(job.labels[0], settings.image_size, chance), ()


def _jpeg(picture: Picture) -> bytes:
    """libjpeg-turbo's default integer transform is bit-exact on all its code paths."""
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
