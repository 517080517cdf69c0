"""What all tools share on the command line: arguments, help, and errors a person can read."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kscl.errors import KsclError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
PICTURE_FORMATS = ("png", "svg", "pdf")

Main = Callable[[Sequence[str] | None], int | None]


def parser(description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose --help ends in commands that can be copied."""
    return argparse.ArgumentParser(
        prog=os.path.basename(sys.argv[0]),
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def picture_path(text: str) -> Path:
    """The type of an argument that names a picture to draw."""
    path = Path(text)
    if path.suffix.lower().lstrip(".") not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(f"{text} does not end in {', '.join(PICTURE_FORMATS)}")
    return path


def add_config_arguments(
    arguments: argparse.ArgumentParser, example: str = "METHOD.NUM_SHOTS 3 SOLVER.EPOCHS 10"
) -> None:
    """The arguments of every tool that has a config, named as Detectron2's train_net names them."""
    arguments.add_argument("--config-file", metavar="FILE", help="a YAML file; see configs/")
    arguments.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved config as YAML that can be fed back, and stop",
    )
    arguments.add_argument(
        "overrides",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help=f"settings that override the file, at the end: {example}",
    )


def add_run_arguments(arguments: argparse.ArgumentParser) -> None:
    """For tools that train: how many processes, and whether a run is new or goes on."""
    arguments.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine, on its GPUs or else its cores (default: %(default)s)",
    )
    how = arguments.add_mutually_exclusive_group()
    how.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in OUTPUT_DIR"
    )
    how.add_argument(
        "--auto-resume", action="store_true", help="go on if there is a checkpoint, else start"
    )


def command(main: Main) -> Main:
    """Turn what a user can fix into `error: …` and exit code 2; a traceback is for bugs."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except KsclError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USER_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return wrapped
