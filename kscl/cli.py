"""The command line of all tools: arguments, help, and errors that people can read.

A command imports what is slow to import (torch, timm, Detectron2) after its arguments are parsed,
so that nobody waits for a --help.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kscl.errors import KsclError, printable
from kscl.registry import import_modules

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
INSERT_OPTION = "--insert"
WORLD_SIZE_OPTION = "--allow-world-size-change"
PICTURE_FORMATS = ("png", "svg", "pdf")

Main = Callable[[Sequence[str] | None], int | None]


def program() -> str:
    """Return the command as it is typed: `kscl VERB`, or another script's name."""
    return Path(sys.argv[0]).name


def parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser whose --help ends in commands that can be copied."""
    return argparse.ArgumentParser(
        prog=program(),
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # or else --output would be taken for --output-dir
    )


def picture_path(text: str) -> Path:
    """Return the path of a picture to draw; the type of such an argument."""
    path = Path(text)
    if path.suffix.lower().lstrip(".") not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(PICTURE_FORMATS)}.")
    return path


def add_flag(arguments: argparse._ActionsContainer, name: str, about: str) -> None:
    """Add an option without a value."""
    arguments.add_argument(name, action="store_true", help=about)


def add_folders(arguments: argparse.ArgumentParser, name: str) -> None:
    """Add where records are read from, and whether they are compared with what is there now."""
    about = "folders to search for records, or submission files (default: output)"
    arguments.add_argument(name, nargs="*", default=["output"], metavar="FOLDER", help=about)
    about = "do not compare code, data and backbone files with the records"
    add_flag(arguments, "--no-stale-check", about)


def add_insert(arguments: argparse.ArgumentParser) -> None:
    """Add the option that puts a board into a document."""
    about = "also write the board into FILE, between <!-- board NAME --> and its end mark"
    arguments.add_argument(INSERT_OPTION, nargs=2, metavar=("FILE", "NAME"), help=about)


def add_config_arguments(
    arguments: argparse.ArgumentParser, example: str = "METHOD.NUM_SHOTS 3 SOLVER.EPOCHS 10"
) -> None:
    """Add the arguments of a tool that has a config, named as in Detectron2's train_net."""
    arguments.add_argument("--config-file", metavar="FILE", help="a YAML file; see configs/")
    add_import(arguments)
    about = "print the resolved config as commented YAML, which --config-file accepts, and stop"
    add_flag(arguments, "--print-config", about)
    arguments.add_argument(
        "overrides",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help=f"settings that override the file, at the end: {example}",
    )


def add_import(arguments: argparse.ArgumentParser) -> None:
    """Add the option that brings parts of others."""
    about = "import a module that registers your own parts; see docs/extending.md"
    arguments.add_argument("--import", action=_Import, metavar="MODULE", help=about)


class _Import(argparse.Action):
    """Import a module at once: what it registers is known when the config is read."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        import_modules([values])


def add_num_gpus(arguments: argparse.ArgumentParser) -> None:
    """Add the number of processes of a tool that launches them."""
    arguments.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine, on its GPUs or else its cores (default: %(default)s)",
    )


def add_run_arguments(arguments: argparse.ArgumentParser, resume_starts: bool = False) -> None:
    """Add the arguments of a tool that trains: number of processes, and new or resumed run.

    `resume_starts` says that --resume starts a run where there is none, as in Detectron2.
    """
    add_num_gpus(arguments)
    how = arguments.add_mutually_exclusive_group()
    otherwise = ", or start if there is none" if resume_starts else ""
    add_flag(how, "--resume", f"resume from the newest checkpoint in OUTPUT_DIR{otherwise}")
    add_flag(how, "--auto-resume", "resume if there is a checkpoint, else start")


def add_world_size_argument(arguments: argparse.ArgumentParser) -> None:
    """Add the option that lets a run resume on another number of processes."""
    about = "resume on another number of processes; the record will say so"
    add_flag(arguments, WORLD_SIZE_OPTION, about)


def add_check_arguments(
    arguments: argparse.ArgumentParser, what: str = "config, data and weights"
) -> None:
    """Add the arguments that let a tool look for problems instead of starting."""
    about = f"check {what}, print problems as JSON, and stop; exit code 1 if there is one"
    add_flag(arguments, "--check", about)
    arguments.add_argument(
        "--check-later",
        action="append",
        default=[],
        metavar="NAME",
        help="with --check: skip a path, or a key, whose file another command will make",
    )


def is_later(name: str, later: Sequence[str]) -> bool:
    """Return whether a key, or a path or part of layout:PATH:PATH, is not there yet."""
    pieces = (name, *name.split(":"))
    return any(Path(piece).is_relative_to(missing) for piece in pieces for missing in later)


def report_problems(
    *checks: Callable[[], Iterable[object] | None], estimate: Callable[[], float] | None = None
) -> int:
    """Run every check, print what they return or raise as JSON, and return the exit code.

    If all is good, `estimate` adds the seconds that the run may take.
    """
    problems: list[dict[str, Any]] = []
    for check in checks:
        try:
            problems += [vars(problem) for problem in check() or ()]
        except KsclError as error:
            problems.append({"kind": "error", "what": str(error), "fatal": True})
    good = not any(problem["fatal"] for problem in problems)
    report: dict[str, Any] = {"good": good, "problems": problems}
    if good and estimate is not None:
        report["seconds"] = estimate()
    print(json.dumps(report, indent=1), flush=True)
    return 0 if good else 1


def command(main: Main) -> Main:
    """Print what a user can fix as `error: …` and return 2; only bugs end in a traceback."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except KsclError as error:
            print_error(error)
            return EXIT_USER_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return wrapped


def print_error(error: KsclError) -> None:
    """Print what a user can fix."""
    text = printable(str(error), kept="\n\t")
    print(f"error: {text}", file=sys.stderr)
