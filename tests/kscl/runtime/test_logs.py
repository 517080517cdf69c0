"""Logs: a line for a person, the same as JSON for a program, from rank 0 only."""

from __future__ import annotations

import io
import json
import os
import sys

from kscl.runtime.logs import LOG_FILE, progress, set_up_logging


def test_a_line_goes_to_the_terminal_and_as_json_to_the_folder(tmp_path, capsys):
    logger = set_up_logging(tmp_path)
    logger.info("step %d", 3, extra={"data": {"loss": 1.5}})
    assert capsys.readouterr().err.rstrip().endswith("step 3")
    (line,) = (tmp_path / LOG_FILE).read_text().splitlines()
    line = json.loads(line)
    assert line["message"] == "step 3"
    assert line["level"] == "info"
    assert line["data"] == {"loss": 1.5}


def test_a_name_of_any_bytes_reaches_neither_the_terminal_as_it_is_nor_stops_the_log(
    tmp_path, capsys
):
    logger = set_up_logging(tmp_path)
    name = os.fsdecode(b"caf\xe9\r\x1b[31m.jpg")  # no UTF-8, and a terminal would obey it
    logger.warning("%s is skipped", name)
    logger.info("line one\nline two")
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert "\r" not in told
    assert told.count("\n") == 3
    lines = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert [line["message"] for line in lines] == [f"{name} is skipped", "line one\nline two"]


def test_other_ranks_are_silent(tmp_path, capsys):
    set_up_logging(tmp_path, rank=1).error("nobody hears this")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / LOG_FILE).exists()


def test_setting_up_twice_does_not_double_the_lines(tmp_path, capsys):
    set_up_logging(tmp_path)
    set_up_logging(tmp_path).info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_progress_is_plain_lines_when_piped():
    stream = io.StringIO()
    assert list(progress(range(5), "drawing", stream=stream)) == [0, 1, 2, 3, 4]
    assert stream.getvalue().startswith("drawing: 5 of 5, ")
    assert "\r" not in stream.getvalue()


def test_progress_is_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    list(progress(range(5), "drawing", stream=stream))
    assert "\r" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert "it/s" in stream.getvalue()


def test_lines_go_to_what_stderr_is_now_not_to_what_it_was(monkeypatch, capsys):
    before = io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    logger = set_up_logging()
    monkeypatch.undo()
    before.close()
    logger.info("still heard")
    assert "still heard" in capsys.readouterr().err


def test_a_log_file_on_a_full_disk_is_given_up_in_one_line(tmp_path, capsys):
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    logger = set_up_logging(tmp_path)
    for number in range(3):
        logger.info("line %d", number)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.count(f"{tmp_path / LOG_FILE} is no longer written") == 1
    assert "line 2" in text
