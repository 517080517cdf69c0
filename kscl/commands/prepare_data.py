"""Bring data into the layout that the configs expect, or check that it has it.

own       your own images with LabelImg or VOC XML files, a COCO JSON, YOLO text files or
          Cityscapes' pictures of object numbers, however nested; or images in one folder per class.
          Checked, split without near-duplicates on both sides, and written as links; where objects
          are small, with tiles of the images to pretrain on. Your files are never changed
voc       VOC 2007 and 2012: downloaded unless the archives are there, checked by their hashes, and
          merged as Detectron2 expects them (2007's test beside its trainval, in one VOC2007 folder)
imagenet  train/ and val/ with one folder per class: checked, never changed
cifar10   the 20,000 training images of configs/suites/small/ as cifar10_20k/train and /val, and
          that train in parts as cifar10_small/pretrain (2,000), /train, /val and /test (10,000);
          from torchvision's archive or a copy of the training images with one folder per class
stl10     as stl10/unlabeled, and /train and /test with one folder per class
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from kscl import cli
from kscl.data.annotations import ANNOTATION_FORMATS

EXAMPLES = """  kscl prepare own --images photos --annotations labels \\
      --output-dir data/mine
  kscl prepare own --images photos_by_class --output-dir data/classes
  kscl prepare voc --root datasets
  kscl prepare voc --root datasets --archives /mnt/downloads
  kscl prepare imagenet --root /data/imagenet
  kscl prepare cifar10 --root datasets --archives /mnt/downloads
then, after own: kscl start data/mine; after voc: export DETECTRON2_DATASETS=datasets
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Prepare or check one data set."""
    given = _parser().parse_args(argv)
    if given.what == "own":
        from kscl.datasets.own import Request, prepare_own

        wanted = {each.name: getattr(given, each.name) for each in fields(Request)}
        print(prepare_own(Request(**wanted)))
        print(f"Ready: {given.output_dir}. Next: kscl start {given.output_dir}")
        return 0
    from kscl.datasets import public

    if given.what == "imagenet":
        print(public.check_imagenet(given.root, given.num_classes))
        return 0
    root, archives = given.root, given.archives or given.root
    if given.what == "voc":
        public.prepare_voc(root, archives, public.voc_archives(), given.mirror)
        print(f"Ready: {root}/VOC2007 and VOC2012; export DETECTRON2_DATASETS={root}")
    else:
        prepare = {"cifar10": public.prepare_cifar10, "stl10": public.prepare_stl10}[given.what]
        print(f"Ready: {prepare(root, archives)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _add_own(kinds.add_parser("own", help="your own images", allow_abbrev=False))
    for name in ("voc", "imagenet", "cifar10", "stl10"):
        kind = kinds.add_parser(name, help=f"the public set {name}", allow_abbrev=False)
        about = "folder of the data, present or to be made"
        kind.add_argument("--root", type=Path, required=True, help=about)
        if name == "imagenet":
            kind.add_argument("--num-classes", type=int, default=1000, help=argparse.SUPPRESS)
            continue
        about = "folder of downloads, or of a copy of CIFAR-10 (default: --root)"
        kind.add_argument("--archives", type=Path, help=about)
        if name == "voc":
            kind.add_argument("--mirror", help="address to download the same files from")
    return parser


def _add_own(own: argparse.ArgumentParser) -> None:
    add = own.add_argument
    about = "your images, in any folder structure"
    add("--images", type=Path, required=True, metavar="DIR", help=about)
    formats = ", ".join(each.files for each in ANNOTATION_FORMATS.values())
    about = f"one of: {formats}; without it, the images must be in class folders"
    add("--annotations", type=Path, metavar="DIR", help=about)
    add("--output-dir", type=Path, required=True, metavar="DIR", help="the folder to write")
    about = "percent to train on and to test on (%(default)s)"
    add("--split", default="75/25", metavar="A/B", help=about)
    add("--seed", type=int, default=0, help="seed of the split (%(default)s)")
    about = "format of the annotations, if several fit"
    add("--format", choices=ANNOTATION_FORMATS, default="", help=about)
    about = "the classes in order, where labels are numbers (YOLO) and no file lists them"
    add("--classes", nargs="+", default=[], metavar="NAME", help=about)
    case = own.add_mutually_exclusive_group()
    for option, value, about in (
        ("--merge-case", True, "unite class names that differ only by case"),
        ("--keep-case", False, "keep class names that differ only by case apart"),
    ):
        case.add_argument(
            option, dest="merge_case", action="store_const", const=value, default=None, help=about
        )
    cli.add_flag(own, "--skip-bad", "leave out images that have a problem")
    cli.add_import(own)  # an annotation format of one's own
