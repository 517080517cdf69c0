"""One picture of the whole drawn data set, made from the files on disk."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from kscl.data.annotated.voc import read_voc
from kscl.data.annotations import AnnotatedImage
from kscl.datasets.shapes.write import VOC, read_manifest
from kscl.errors import KsclError

_PAPER, _INK, _FAINT = (250, 249, 246), (38, 38, 42), (120, 118, 112)
_PLAIN, _TRUNCATED, _DIFFICULT = (94, 232, 129), (255, 208, 64), (255, 92, 92)
_CROP, _GAP, _MARGIN, _NAME_WIDTH = 58, 4, 22, 128
_CROPS, _SCENES = 4, 4


def draw_contact_sheet(folder: str | Path, path: str | Path) -> None:
    """Draw crops of each class in two columns, and below them some scenes with their boxes."""
    folder, path = Path(folder), Path(path)
    classes = read_manifest(folder)["classes"]
    rows = -(-len(classes) // 2)
    column = _NAME_WIDTH + _CROPS * (_CROP + _GAP)
    width = 2 * column + 3 * _MARGIN - 2 * _GAP
    scenes_top = _MARGIN + rows * (_CROP + _GAP) + 40
    scene_side = (width - 2 * _MARGIN - (_SCENES - 1) * _GAP * 2) // _SCENES
    sheet = Image.new("RGB", (width, scenes_top + scene_side + _MARGIN), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for index, name in enumerate(classes):
        left = _MARGIN + (index // rows) * (column + _MARGIN - _GAP)
        top = _MARGIN + (index % rows) * (_CROP + _GAP)
        _write(pen, left, top + _CROP // 2, name)
        crops = sorted((folder / "classes/train" / name).glob("*.jpg"))[:_CROPS]
        for place, file in enumerate(crops):
            crop = _resized(file, (_CROP, _CROP))
            sheet.paste(crop, (left + _NAME_WIDTH + place * (_CROP + _GAP), top))
    _draw_legend(pen, _MARGIN, scenes_top - 26)
    images = read_voc(folder / VOC, "trainval", classes).checked().images
    # Square scenes fill their cell of the sheet.
    square_first = sorted(images[: 8 * _SCENES], key=lambda image: image.width != image.height)
    for place, image in enumerate(square_first[:_SCENES]):
        left = _MARGIN + place * (scene_side + 2 * _GAP)
        sheet.paste(_with_boxes(image, scene_side), (left, scenes_top))
    buffer = io.BytesIO()
    _in_few_colors(sheet).save(buffer, "PNG", optimize=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    except OSError as error:
        raise KsclError(
            f"The contact sheet {path} cannot be written: {error.strerror}. Choose another path."
        ) from error


def _write(pen: ImageDraw.ImageDraw, left: int, middle: int, text: str) -> None:
    pen.text((left, middle), text, fill=_INK, font=ImageFont.load_default(14), anchor="lm")


def _draw_legend(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
    font = ImageFont.load_default(13)
    _write(pen, left, top + 7, "Detection scenes")
    left += _NAME_WIDTH
    for color, meaning in (
        (_PLAIN, "object"),
        (_TRUNCATED, "truncated by the border"),
        (_DIFFICULT, "difficult: tiny, or largely hidden"),
    ):
        pen.rectangle((left, top + 1, left + 12, top + 13), outline=color, width=3)
        pen.text((left + 19, top + 7), meaning, fill=_FAINT, font=font, anchor="lm")
        left += 40 + int(pen.textlength(meaning, font=font))


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


def _in_few_colors(sheet: Image.Image) -> Image.Image:
    """Reduce the sheet to a palette, a quarter of the size, in which marks keep their colors."""
    marks = (_PAPER, _INK, _FAINT, _PLAIN, _TRUNCATED, _DIFFICULT)
    method = Image.Quantize.MEDIANCUT
    photographs = sheet.quantize(256 - len(marks), method=method).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*photographs, *(level for mark in marks for level in mark)])
    return sheet.quantize(palette=palette, dither=Image.Dither.NONE)
