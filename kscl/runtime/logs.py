"""Logging: readable lines on the terminal, the same as JSON lines in a file.

Only rank 0 logs. Progress is a bar on a terminal, and a plain line now and then when piped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TextIO, TypeVar

from tqdm import tqdm

from kscl.errors import printable

LOGGER = "kscl"
LOG_FILE = "log.jsonl"
SECONDS_BETWEEN_LINES = 10.0

Item = TypeVar("Item")


class _JsonLines(logging.Formatter):
    """One object per line: time, level, message, and `extra={"data": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if data := getattr(record, "data", None):
            line["data"] = data
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _LogFile(logging.FileHandler):
    """A log file that reports a full disk once, in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        with contextlib.suppress(OSError):
            self.close()
        logging.getLogger(LOGGER).removeHandler(self)
        print(f"warning: {self.baseFilename} is no longer written: {error}.", file=sys.stderr)


class _AboveTheBar(logging.Handler):
    """Write above a running progress bar, to the current stderr.

    Lines are escaped: a file name in them may contain control characters.
    """

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(printable(self.format(record), kept="\n\t"), file=sys.stderr)


def set_up_logging(output_dir: str | Path | None = None, rank: int = 0) -> logging.Logger:
    """Set up and return the logger of this process; on ranks other than 0 it is silent."""
    logger = reset_logging()
    logger.propagate = False
    if rank != 0:
        logger.addHandler(logging.NullHandler())
        return logger
    logger.setLevel(logging.INFO)
    console = _AboveTheBar()
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(console)
    if output_dir is not None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        lines = _LogFile(folder / LOG_FILE, encoding="utf-8", errors="backslashreplace")
        lines.setFormatter(_JsonLines())
        logger.addHandler(lines)
    return logger


def reset_logging() -> logging.Logger:
    """Remove our handlers and pass everything to the parent logger, as before any set-up."""
    logger = logging.getLogger(LOGGER)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    return logger


def progress(
    items: Iterable[Item], what: str, total: int | None = None, stream: TextIO | None = None
) -> Iterator[Item]:
    """Yield the items, showing how many are done, how fast, and the time that remains."""
    stream = stream or sys.stderr
    if total is None and isinstance(items, Sized):
        total = len(items)
    if stream.isatty():
        yield from tqdm(items, desc=what, total=total, file=stream, dynamic_ncols=True)
        return
    start = last = time.monotonic()
    done = 0
    for item in items:
        yield item
        done += 1
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(_progress_line(what, done, total, now - start), file=stream, flush=True)
    print(_progress_line(what, done, total, time.monotonic() - start), file=stream, flush=True)


def _progress_line(what: str, done: int, total: int | None, elapsed: float) -> str:
    rate = done / max(elapsed, 1e-9)
    line = f"{what}: {done:,}" + (f" of {total:,}" if total is not None else "")
    line += f", {rate:,.1f}/s"
    if total is not None and 0 < done < total:
        line += f", about {clock((total - done) / rate)} left"
    elif elapsed >= 1:
        line += f", {clock(elapsed)} in all"
    return line


def clock(seconds: float) -> str:
    """Return seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
