"""Get the public data sets into the layout that the configs expect, or check that they are.

voc       VOC 2007 and 2012: downloaded unless the archives are there, checked by their hashes, and
          merged as Detectron2 wants them (2007's test beside its trainval, in one VOC2007 folder)
imagenet  train/ and val/ with one folder a class: looked at, never changed
cifar10   the 20,000 training images of configs/suites/small/ as cifar10_20k/train and /val, from
          torchvision's archive or a copy of the training images with one folder a class
stl10     as stl10/unlabelled, and /train and /test with one folder a class
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.datasets.cifar10 import prepare_cifar10_20k
from kscl.datasets.imagenet import IMAGENET_CLASSES, check_imagenet
from kscl.datasets.stl10 import prepare_stl10
from kscl.datasets.voc import prepare_voc, voc_archives

EXAMPLES = """  python tools/prepare_data.py voc --root datasets
  python tools/prepare_data.py voc --root datasets --archives /mnt/downloads
  python tools/prepare_data.py imagenet --root /data/imagenet
  python tools/prepare_data.py cifar10 --root datasets --archives /mnt/downloads
then: export DETECTRON2_DATASETS=datasets
"""

PICTURE_SETS = {"cifar10": prepare_cifar10_20k, "stl10": prepare_stl10}


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("what", choices=("voc", "imagenet", *PICTURE_SETS))
    parser.add_argument("--root", type=Path, required=True, help="where the data is, or shall be")
    parser.add_argument(
        "--archives",
        type=Path,
        help="where downloads are kept, or a copy of CIFAR-10 lies (default: --root)",
    )
    parser.add_argument("--mirror", help="an address that has the same files, instead of VOC's own")
    parser.add_argument("--num-classes", type=int, default=IMAGENET_CLASSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.what == "imagenet":
        print(check_imagenet(arguments.root, arguments.num_classes))
        return 0
    archives = arguments.archives or arguments.root
    if arguments.what in PICTURE_SETS:
        print(f"ready: {PICTURE_SETS[arguments.what](arguments.root, archives)}")
        return 0
    prepare_voc(arguments.root, archives, voc_archives(), arguments.mirror)
    print(
        f"ready: {arguments.root}/VOC2007 and VOC2012; export DETECTRON2_DATASETS={arguments.root}"
    )
    return 0
