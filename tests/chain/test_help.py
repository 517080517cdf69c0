"""Nobody waits for a --help: no tool or verb imports a deep-learning library to print it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kscl
from kscl.main import VERBS, main
from tests.helpers.commands import ROOT, run

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))
SLOW = {"torch", "torchvision", "timm", "detectron2", "sklearn", "matplotlib", "cv2"}
# Run a script as `python SCRIPT …` does; then name what it has imported, and the seconds it took.
PROGRAM = """
import runpy, sys, time
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("MODULES", time.process_time(), *sys.modules)
"""


def printed_by(script: str, *words: str) -> tuple[str, float]:
    """What a script prints, which must not load a slow library, and its CPU seconds."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(ROOT / script), *words]
    done = run(*command, cwd=ROOT / "tools" if script.startswith("tools") else ROOT)
    assert done.returncode == 0, done.stderr
    text, _, told = done.stdout.rpartition("MODULES")
    seconds, *modules = told.split()
    assert not SLOW & {module.split(".")[0] for module in modules}
    return text, float(seconds)


@pytest.mark.parametrize("name", TOOLS)
def test_help_of_a_tool_imports_no_slow_library(name):
    text, _ = printed_by(f"tools/{name}.py", "--help")
    assert text.startswith("usage: ")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_no_slow_library(verb):
    text, _ = printed_by("kscl/__main__.py", *verb.split(), "--help")
    assert text.startswith(f"usage: kscl {verb} ")
    kinds = re.findall(r"^    ([a-z0-9]+)  ", text, re.M) if verb in ("prepare", "export") else []
    for kind in kinds:
        text += printed_by("kscl/__main__.py", verb, kind, "--help")[0]
    assert options_in_docs(verb) <= set(re.findall(r"--[a-z][a-z-]+", text))


def options_in_docs(verb: str) -> set[str]:
    """The options that README and docs give to a verb."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    uses = re.findall(rf"kscl {verb}(?![\w-])([^`\n|;]*)", text)
    return {option for use in uses for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", use)}


def test_kscl_lists_every_verb_within_a_second():
    text, seconds = printed_by("kscl/__main__.py", "--help")
    assert {line[2:22].strip() for line in text.splitlines()} >= {verb[:20] for verb in VERBS}
    assert seconds < 1


def test_kscl_prints_its_version_and_commit():
    text, _ = printed_by("kscl/__main__.py", "--version")
    commit = run("git", "rev-parse", "HEAD").stdout.strip()
    assert text.startswith(f"kscl {kscl.__version__} (commit {commit}")


def test_every_tool_is_a_verb():
    others = {"benchmark", "setup_environment"}  # they work on the repository
    sources = [Path(ROOT, "tools", f"{name}.py").read_text() for name in {*TOOLS} - others]
    run_by_tools = [re.findall(r'^    run\("(.*)"\)$', source, re.M) for source in sources]
    assert sorted(run_by_tools) == sorted([verb] for verb in {*VERBS} - {"demo", "compare"})


def test_a_verb_runs_where_a_file_has_the_name_of_its_package():
    done = run(sys.executable, "-m", "kscl", "probe", "--print-config", cwd=ROOT / "tools")
    assert done.returncode == 0, done.stderr
    assert "PROBE:" in done.stdout


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("prtrain --config-file x.yaml", "kscl pretrain"),
        ("leaderboard output", "kscl board"),  # the name of a tool
        ("visualize bases", "kscl visualize basis"),
    ],
)
def test_an_unknown_verb_names_the_nearest(words, nearest, capsys):
    assert main(words.split()) == 2
    assert f"`{nearest}`" in capsys.readouterr().err


def test_a_verb_of_several_lists_them(capsys):
    assert main(["visualize"]) == 0
    text = capsys.readouterr().out
    assert "visualize training" in text
    assert "pretrain " not in text


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("kscl vis", "visualize"),
        ("kscl visualize tr", "training"),
        ("kscl board --fig", "--figure"),
        ("kscl visualize basis --rand", "--random-weights"),
        ("kscl board res", ""),  # then bash completes files
    ],
)
def test_bash_completes_verbs_and_options(line, completed):
    kscl = f"{sys.executable} -m kscl"
    program = f'''kscl() {{ {kscl} "$@"; }}; eval "$(kscl --completion)"
    COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _kscl kscl "${{COMP_WORDS[-1]}}"; echo "${{COMPREPLY[@]}}"'''
    assert run("bash", "-c", program).stdout.strip() == completed


def test_without_a_bare_help_the_package_registers_its_head():
    program = (
        "import sys; sys.argv = ['mine.py', '--config', 'x', '--help']; import detection\n"
        "from detectron2.modeling import ROI_HEADS_REGISTRY as known\n"
        "assert 'Res5ROIHeadsExtraNorm' in known"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, check=True)
