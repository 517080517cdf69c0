"""Find objects in photos with a detector you trained; write pictures with boxes and a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from detection import MIN_SCORE
from detection.install import require_detectron2
from kscl import cli
from kscl.data.formats import is_image
from kscl.data.source import Walk, walk_files
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

EXAMPLES = """  kscl predict output/mine/kscl/seed0 photo.jpg --output-dir found
  kscl predict output/mine/kscl/seed0 holiday/ --min-score 0.7 --output-dir found
"""
JSON_FILE = "predictions.json"


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_import(parser)
    parser.add_argument("run", type=Path, help="a folder of kscl train-net, or one around it")
    parser.add_argument("photos", type=Path, nargs="+", help="images, or folders of images")
    about = "for the pictures and predictions.json (%(default)s)"
    parser.add_argument("--output-dir", type=Path, default=Path("predictions"), help=about)
    about = "least score of a box (%(default)s)"
    parser.add_argument("--min-score", type=float, default=MIN_SCORE, help=about)
    given = parser.parse_args(argv)
    if not 0 <= given.min_score <= 1:
        raise KsclError(f"--min-score must be between 0 and 1, got {given.min_score:g}.")
    photos = _photos(given.photos)
    require_detectron2()

    from detection.predict import load_predictor, read_photo, weakness
    from detection.scoring.pictures import draw_found

    _refuse_overwriting(photos, given.output_dir)
    predict = load_predictor(given.run, given.min_score)
    weak = weakness(given.run)
    if weak:
        print(f"Warning: {weak}", flush=True)
    content, bad = [], []
    for name, path in photos.items():
        try:
            picture = read_photo(path)
        except KsclError as error:
            bad.append(str(error))
            continue
        found = predict(picture)
        draw_found(picture, found, given.output_dir / name)
        height, width = picture.shape[:2]
        objects = [asdict(thing) for thing in found]
        content.append({"file": str(path), "width": width, "height": height, "objects": objects})
        print(f"{path}: {len(found)} found", flush=True)
    text = json.dumps({"images": content, "unreadable": bad}, indent=1)
    write_atomically(given.output_dir / JSON_FILE, text.encode())
    print(f"Written: {given.output_dir / JSON_FILE} and {len(content)} pictures.")
    if bad:
        raise KsclError("\n".join(bad))
    return 0


def _refuse_overwriting(photos: Mapping[str, Path], output_dir: Path) -> None:
    """Raise an error if a picture with boxes would replace a photo."""
    originals = {path.resolve() for path in photos.values()}
    for name in photos:
        if (output_dir / name).resolve() in originals:
            raise KsclError(
                f"--output-dir {output_dir} would overwrite the photo {output_dir / name}. Choose "
                "another folder."
            )


def _photos(given: Sequence[Path]) -> dict[str, Path]:
    """Return the images by the name of the picture to write, with folders if a name repeats.

    If names differ only in their suffix, the pictures keep it: a.jpg.png and a.bmp.png.
    """
    found: dict[str, tuple[str, Path]] = {}  # by path, so a file named twice is one image
    for path in given:
        if path.is_dir():
            names = sorted(name for name, _ in walk_files(str(path), Walk()) if is_image(name))
            found |= {os.path.abspath(path / name): (name, path / name) for name in names}
        elif path.is_file():
            found[os.path.abspath(path)] = path.name, path
        else:
            raise KsclError(f"{path} is not there. Name images or folders of images.")
    if not found:
        raise KsclError(f"{', '.join(map(str, given))} has no image. Name some.")
    if len({name for name, _ in found.values()}) == len(found):
        photos = dict(found.values())
    else:
        top = os.path.commonpath([os.path.dirname(full) for full in found])
        photos = {os.path.relpath(full, top): path for full, (_, path) in found.items()}
    without_suffix = {f"{os.path.splitext(name)[0]}.png": path for name, path in photos.items()}
    if len(without_suffix) == len(photos):
        return without_suffix
    return {f"{name}.png": path for name, path in photos.items()}
