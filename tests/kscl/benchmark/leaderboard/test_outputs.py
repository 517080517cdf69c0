"""The leaderboard's files: what they say, and that no record can make them say anything else."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from kscl.benchmark.leaderboard.exports import as_csv, as_json
from kscl.benchmark.leaderboard.page import page, page_data
from kscl.benchmark.leaderboard.rows import Board, build_board
from kscl.benchmark.leaderboard.tables import compact, markdown, overview_cells
from kscl.commands.leaderboard import FORMATS, main
from kscl.records.record import Protocol, make_record
from tests.helpers.commands import tool
from tests.helpers.faults.full_disk import small_files
from tests.helpers.leaderboard_records import (
    DETECTION,
    INFO,
    LINEAR,
    PNG,
    a_whole_board,
    config,
    described,
    detection,
    evaluation,
    kscl,
    linear,
    pretraining,
    runs,
    sha,
    write_all,
)


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> Board:
    folder = write_all(tmp_path_factory.mktemp("records"), a_whole_board())
    return build_board([folder], check_stale=False)


def overview_of(board: Board) -> str:
    return compact(*overview_cells(board))


def cells_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_overview_has_one_row_a_contender_and_one_protocol_a_column(board):
    header, _, *rows = cells_of(overview_of(board))
    assert header[:11] == [
        *("method", "top-1 (a)", "top-5 (a)", "top-1 (b)", "top-5 (b)", "kNN"),
        *("AP (a)", "AP50 (a)", "AP75 (a)", "AP (b)", "AP50 (b)"),
    ]
    assert header[12:15] == ["epochs", "K", "ρ"]
    assert overview_of(board).endswith("\n\nAll rows: backbone resnet50.")
    assert header[15:] == ["mean rank kept", "min/epoch", "views/s", "n_pretrain", "n_finetune"]
    assert len(rows) == len(board.rows) == 7
    assert all(len(row) == len(header) for row in rows)


def test_the_markdown_tells_spread_marks_counts_and_the_test(board):
    written = markdown(board, "Board")
    assert "Welch's t test" in written
    section = written.split("## shapes-tiny-c4")[1].split("\n## ")[0]
    header, _, *rows = cells_of(section)
    by_name = [dict(zip(header, row, strict=True)) for row in rows]
    assert re.fullmatch(r"\*\*[\d.]+ ± [\d.]+\*\*", by_name[0]["AP"])
    assert [row["mark"] for row in by_name[:3]] == ["best", *["not distinguishable"] * 2]
    assert [row["rank"] for row in by_name[:3]] == ["1", "1", "1"]
    assert by_name[-1]["mark"] == "below the best"
    assert (by_name[0]["n_pretrain"], by_name[0]["n_finetune"]) == ("3", "6")
    probe = written.split("## linear-cached")[1].split("\n## ")[0]
    first = dict(zip(cells_of(probe)[0], cells_of(probe)[2], strict=True))
    assert (first["method"], first["rank"]) == ("supervised", "")
    assert first["mark"] == "not tested: one pretraining seed"
    assert first["95% interval"].endswith("†")


def test_published_rows_have_their_source_and_a_table_of_their_own(board):
    written = markdown(board, "Board").split("## voc0712-c4-24k-moco")[1]
    ours, theirs = written.split("Reported elsewhere")
    assert "57.4 ± 0.2" not in ours
    assert "57.4 ± 0.2" in theirs
    assert "detection/README" in theirs


def test_the_csv_has_a_line_for_each_row_and_protocol(board):
    lines = list(csv.DictReader(io.StringIO(as_csv(board))))
    measured = [line for line in lines if line["source"] == "measured"]
    assert len(measured) == sum(len(section.rows) for section in board.sections)
    best = next(x for x in measured if x["verdict"] == "best" and x["kind"] == "detection")
    assert float(best["AP_low"]) < float(best["AP"]) < float(best["AP_high"])
    assert best["interval"] == "over pretraining seeds"
    reported = [line for line in lines if line["source"].startswith("reported: ")]
    assert reported
    assert not any(line["rank"] or line["verdict"] for line in reported)


def test_the_json_holds_every_value_and_the_ids_of_its_records(board):
    content = json.loads(as_json(board, "Board"))
    for row, told in zip(board.rows, content["rows"], strict=True):
        ids = {*told["pretraining"], *(i for result in told["results"] for i in result["records"])}
        assert ids == {loaded.id for loaded in row.records}
    voc = next(p for p in content["protocols"] if p["protocol_id"].startswith("voc"))
    assert voc["definition"]["iterations"] == 24000
    result = next(
        r for row in content["rows"] for r in row["results"] if r["n_finetune"] > r["n_pretrain"]
    )
    assert len(result["metrics"]["AP"]["values"]) == result["n_pretrain"]


def test_one_long_name_does_not_widen_the_table_for_all(tmp_path):
    records = [
        linear(50 + i, sha(i), details=described(name, 0))
        for i, name in enumerate(("a", "b" * 10_000))
    ]
    board = build_board([write_all(tmp_path, records)], check_stale=False)
    assert max(map(len, overview_of(board).splitlines())) < 500


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_a_terminal_gets_25_lines_of_100_columns_and_the_answer_last(
    tmp_path, monkeypatch, capsys, rows
):
    monkeypatch.chdir(tmp_path)
    records = [linear(20.0, sha("random"), details=described("random", 0))]
    for number in range(rows):
        name = f"method_{number}_" + "x" * 90 * (number % 2)
        records += [linear(50.0 + number, sha(number), details=described(name, 0))]
        records += [detection(30.0 + number, sha(number), details=described(name, 0))]
    folder = write_all(tmp_path / "records", records)
    assert main([str(folder), "--output-dir", "board", "--no-stale-check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    assert lines[0].split()[:2] == ["method", "top-1"]  # nothing else varies but AP50 and AP
    assert lines[-1] == "The page is board/leaderboard.html"
    table, _, rest = "\n".join(lines).partition("All rows: backbone resnet50")
    assert "random" in table
    assert "random weights" in rest
    assert ("more rows" in "\n".join(lines)) is (rows == 40)


def test_a_board_that_does_not_fit_on_the_disk_is_one_line(tmp_path, capsys):
    folder = write_all(tmp_path / "records", [linear(50, sha(1))])
    with small_files(500):
        code = main([str(folder), "--output-dir", str(tmp_path / "board")])
    assert code == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "board" / "leaderboard.md") in error
    assert error.count("\n") == 1
    (whole,) = (tmp_path / "board").iterdir()  # nothing half-written is left
    assert whole.name == "leaderboard.txt"


def test_the_page_names_no_other_place(board, tmp_path):
    written = page(board, "Board", tmp_path)
    program = written.split('id="data">')[0] + written.split("</script>")[1]
    assert set(re.findall(r"https?://[^\s\"']+", program)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in written


def shown_basis(folder: Path, named: str | None, beside: bytes = b"") -> str | None:
    write_all(folder / "records", [pretraining(details={"basis_figure": named})])
    if beside:
        (folder / "records" / "run_0000" / "basis.png").write_bytes(beside)
    board = build_board([folder / "records"], check_stale=False)
    return page_data(board, folder)["rows"][0]["basis"]


def test_a_basis_figure_becomes_part_of_the_page(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "basis.png").write_bytes(PNG)
    assert shown_basis(tmp_path, "../basis.png").startswith("data:image/png;base64,")
    drawn_later = shown_basis(tmp_path / "later", None, beside=PNG)
    assert drawn_later.startswith("data:image/png;base64,")


@pytest.mark.parametrize("named", ["../../secret.png", "../notes.txt", "../nowhere.png", "a\0b"])
def test_a_figure_from_elsewhere_or_that_is_no_picture_is_left_out(tmp_path, named):
    (tmp_path / "records").mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "records" / "notes.txt").write_text("not a picture")
    assert shown_basis(tmp_path, named) is None


def test_the_command_writes_every_format_and_prints_the_table(tmp_path):
    folder = write_all(tmp_path / "records", runs(kscl(5, 0.4), 68, seeds=2))
    (folder / "run_0000" / "record.json").write_text("{}")
    done = tool("leaderboard", folder, "--output-dir", tmp_path / "board")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "board").iterdir()) == sorted(
        f"leaderboard.{name}" for name in FORMATS
    )
    assert done.stdout.startswith((tmp_path / "board" / "leaderboard.txt").read_text())
    assert done.stdout.endswith("leaderboard.html\n")
    assert "Not counted: run_0000/record.json: It is not a record" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "nowhere: There is no such folder"),
        ([".", "--formats", "pdf"], "--formats must be some of txt, md, csv, json, html, got pdf"),
        ([".", "--formats", ","], "--formats must be some of txt"),
    ],
)
def test_what_a_user_can_get_wrong_is_said_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, reason
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("baseline", ["kscl@7", "kscl", "mocov2"])
def test_a_baseline_that_fits_no_one_row_costs_its_table_and_not_the_board(
    tmp_path, capsys, baseline
):
    records = [*runs(kscl(5, 0.4), 68, seeds=2), *runs(kscl(3, 0.4), 67, seeds=2)]
    folder, document = write_all(tmp_path / "records", records), tmp_path / "text.md"
    document.write_text("<!-- board b -->\n<!-- end of board b -->\n")
    words = [str(folder), "--output-dir", str(tmp_path / "board"), "--baseline", baseline]
    assert main([*words, "--insert", str(document), "b"]) == 2
    said = capsys.readouterr().err
    assert f"--baseline {baseline}: " in said
    text = (tmp_path / "board" / "leaderboard.md").read_text()
    assert "Warning: --baseline" in text
    assert "## Overview" in text
    assert document.read_text().count("\n") == 2  # nothing was put into it


def test_formats_and_published_rows_can_be_left_out(tmp_path, capsys):
    folder = write_all(tmp_path / "records", [detection(57, sha(1))])
    options = ["--formats", "md", "--no-reported", "--no-stale-check", "--title", "Mine"]
    assert main([str(folder), "--output-dir", str(tmp_path / "board"), *options]) == 0
    (path,) = (tmp_path / "board").iterdir()
    written = path.read_text()
    assert written.startswith("# Mine\n")
    assert "Reported" not in written
    assert str(path) in capsys.readouterr().out


def test_a_record_that_says_nothing_of_its_backbone_is_a_row_under_its_own_name(tmp_path):
    record = make_record(
        kind="linear",
        task=INFO["linear"],
        name="bare",
        protocol=LINEAR,
        metrics={"top1": 50.0},
        seconds=1,
        seed=0,
        cfg=config(),
        without_effect=(),
        data={},
    )
    board = build_board([write_all(tmp_path, [record.as_dict()])], check_stale=False)
    assert board.rows[0].entry.method == "bare"


def test_columns_that_no_row_has_are_hidden_and_masks_have_their_own(tmp_path):
    plain = build_board([write_all(tmp_path / "plain", [detection(30, sha("a"))])])
    assert plain.sections[0].metrics == ("AP", "AP50", "AP75")
    assert "APs" not in as_csv(plain).splitlines()[0]
    metrics = {"AP50": 50.0, "AP": 30.0, "AP75": 31.0, "APs": 9.0, "AR100": 44.0, "mask/AP": 27.5}
    made = evaluation("detection", DETECTION, metrics, sha("b"))
    board = build_board([write_all(tmp_path / "masks", [made])])
    assert board.sections[0].metrics == ("AP", "AP50", "AP75", "APs", "AR100", "mask/AP")
    assert "mask AP" in markdown(board, "Board")
    assert {"APs", "AR100_std", "mask/AP"} <= set(as_csv(board).splitlines()[0].split(","))
    (protocol,) = json.loads(as_json(board, "Board"))["protocols"]
    assert protocol["columns"] == list(board.sections[0].metrics)
    (shown,) = page_data(board, tmp_path)["protocols"]
    assert shown["metrics"]["mask/AP"]["label"] == "mask AP"


def test_protocols_of_one_name_are_told_apart_by_the_settings_that_differ(tmp_path):
    made = [
        evaluation("knn", Protocol("knn", {"k": k, "temperature": 0.07}), {"top1": 50.0}, sha("a"))
        for k in (20, 200)
    ]
    board = build_board([write_all(tmp_path, made)])
    names = sorted((section.name for section in board.sections), key=len)
    assert [name.rsplit(" · ", 1)[1] for name in names] == ["k 20", "k 200"]
