"""One picture of the whole data set, made from the files on disk."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from kscl.datasets.shapes.writing import voc
from kscl.datasets.shapes.writing.manifest import read_manifest
from kscl.errors import KsclError

_PAPER, _INK, _FAINT = (250, 249, 246), (38, 38, 42), (120, 118, 112)
_PLAIN, _TRUNCATED, _DIFFICULT = (94, 232, 129), (255, 208, 64), (255, 92, 92)
_CROP, _GAP, _MARGIN, _NAME_WIDTH = 58, 4, 22, 128
_CROPS, _SCENES = 4, 4
# Photographs do not compress as PNG; a palette makes the sheet a quarter of the size.
_PALETTE_SIZE = 256
_MARKS = (_PAPER, _INK, _FAINT, _PLAIN, _TRUNCATED, _DIFFICULT)


def draw_contact_sheet(folder: str | Path, path: str | Path) -> None:
    """Draw crops of each class in two columns, and below them some scenes with their boxes."""
    folder = Path(folder)
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
        _draw_class(sheet, pen, folder, name, left, _MARGIN + (index % rows) * (_CROP + _GAP))
    _draw_legend(pen, _MARGIN, scenes_top - 26)
    names = (folder / voc.HOME / "ImageSets/Main/trainval.txt").read_text().split()
    for index, name in enumerate(_square(folder, names)[:_SCENES]):
        scene = _with_boxes(folder, name, scene_side)
        sheet.paste(scene, (_MARGIN + index * (scene_side + 2 * _GAP), scenes_top))
    _save(sheet, Path(path))


def _draw_class(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, folder: Path, name: str, left: int, top: int
) -> None:
    pen.text((left, top + _CROP // 2), name, fill=_INK, font=_font(14), anchor="lm")
    crops = sorted((folder / "classes/train" / name).glob("*.jpg"))[:_CROPS]
    for index, path in enumerate(crops):
        with Image.open(path) as picture:
            crop = picture.convert("RGB").resize((_CROP, _CROP), Image.Resampling.LANCZOS)
        sheet.paste(crop, (left + _NAME_WIDTH + index * (_CROP + _GAP), top))


def _draw_legend(pen: ImageDraw.ImageDraw, left: int, top: int) -> None:
    pen.text((left, top + 7), "Detection scenes", fill=_INK, font=_font(14), anchor="lm")
    left += _NAME_WIDTH
    for color, meaning in (
        (_PLAIN, "object"),
        (_TRUNCATED, "truncated by the border"),
        (_DIFFICULT, "difficult: tiny, or largely hidden"),
    ):
        pen.rectangle((left, top + 1, left + 12, top + 13), outline=color, width=3)
        pen.text((left + 19, top + 7), meaning, fill=_FAINT, font=_font(13), anchor="lm")
        left += 40 + int(pen.textlength(meaning, font=_font(13)))


def _square(folder: Path, names: list[str]) -> list[str]:
    """Choose the square scenes first: they fill their cell of the sheet."""

    def is_oblong(name: str) -> bool:
        with Image.open(folder / voc.picture_path(name)) as picture:
            return picture.width != picture.height

    return sorted(names[: 8 * _SCENES], key=is_oblong)


def _with_boxes(folder: Path, name: str, side: int) -> Image.Image:
    with Image.open(folder / voc.picture_path(name)) as picture:
        scale = side / max(picture.size)
        size = (round(picture.width * scale), round(picture.height * scale))
        scene = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(scene)
    for each in ElementTree.parse(folder / voc.annotation_path(name)).iter("object"):
        xmin, ymin, xmax, ymax = (
            int(each.findtext(f"bndbox/{edge}", "0")) for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        color = _PLAIN
        if each.findtext("truncated") == "1":
            color = _TRUNCATED
        if each.findtext("difficult") == "1":
            color = _DIFFICULT
        # 1-based and inclusive: the box covers the pixels from xmin - 1 up to, not with, xmax.
        pen.rectangle(
            ((xmin - 1) * scale, (ymin - 1) * scale, xmax * scale - 1, ymax * scale - 1),
            outline=color,
            width=2,
        )
    return scene


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _in_few_colors(sheet: Image.Image) -> Image.Image:
    """Reduce the sheet to a palette in which the few pixels of the marks keep their own colors."""
    method = Image.Quantize.MEDIANCUT
    photographs = sheet.quantize(_PALETTE_SIZE - len(_MARKS), method=method).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([*photographs, *(level for mark in _MARKS for level in mark)])
    return sheet.quantize(palette=palette, dither=Image.Dither.NONE)


def _save(sheet: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    _in_few_colors(sheet).save(buffer, "PNG", optimize=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    except OSError as error:
        raise KsclError(
            f"The contact sheet {path} cannot be written: {error.strerror}. Choose another path."
        ) from error
