"""Check every stage of a suite before the first one starts: each tool looks for its own problems.

Stages that differ only in seed, label or output folder are checked once. What an earlier stage will
make is left out, except that its network is converted with random weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kscl.benchmark.suite.check_several import Command, Said, run_checks
from kscl.benchmark.suite.execute import DONE, State
from kscl.benchmark.suite.stages import Stage
from kscl.config import one_line, plain
from kscl.errors import KsclError
from kscl.keys import load_config
from kscl.runtime.files import write_atomically

PASSED_FILE = "checked.txt"  # keys of stages whose check has passed
# Settings that a check does not depend on.
OF_ONE_STAGE = ("SEED", "--seed", "LABEL", "KSCL.LABEL", "OUTPUT_DIR")

Show = Callable[[int, int, str], None]  # checks that are done, all of them, the last one's stage


def _show_nothing(done: int, total: int, name: str) -> None:
    pass


def check_stages(
    states: Sequence[State],
    state_dir: Path,
    output_dir: str,
    jobs: int,
    *,
    estimate: bool = False,
    show: Show = _show_nothing,
) -> list[str]:
    """Return what would stop the stages that are to run, one text per problem.

    `show` is called before the first check and after each. With `estimate`, pretrainings whose time
    is not known yet are measured for a few steps, and it is noted in their states; so are those
    whose check has passed before.
    """
    passed = _passed(state_dir)
    waiting: dict[Command, list[Stage]] = {}
    missing = {s.stage.folder for s in states if s.status != DONE}
    for state in states:
        unknown = estimate and state.stage.kind == "pretrain" and state.expected is None
        if state.status == DONE or (state.stage.key in passed and not unknown):
            continue
        command = check_command(state.stage, missing, output_dir)
        if command is not None:
            if unknown and not any(need.folder in missing for need in state.stage.needs):
                command = (*command[:2], "--estimate", *command[2:])
            waiting.setdefault(command, []).append(state.stage)
    if waiting:
        show(0, len(waiting), "")
    results = {}
    for command, said in run_checks(list(waiting), jobs):
        results[command] = _report(said)
        show(len(results), len(waiting), waiting[command][0].name)
    problems = []
    for command, stages in waiting.items():
        found, seconds = results[command]
        for state in states:
            if seconds is not None and state.stage in stages:
                state.expected = seconds
        if found:
            problems += [f"{stages[0].name}: {text}" for text in found]
        else:
            passed |= {stage.key for stage in stages}
    if waiting and passed and state_dir.is_dir():
        write_atomically(state_dir / PASSED_FILE, "\n".join(sorted(passed)).encode())
    return problems


def check_command(stage: Stage, missing: set[str], output_dir: str) -> Command | None:
    """Return the command that checks a stage, or None if there is nothing to check."""
    later = [n.folder for n in stage.needs if n.kind == "shapes" and n.folder in missing]
    words = _without(stage.arguments, OF_ONE_STAGE)
    pretrain = next((need for need in stage.needs if need.kind == "pretrain"), None)
    if stage.kind == "convert":
        if pretrain is not None and pretrain.folder in missing:
            cfg = load_config(_value(pretrain, "--config-file"), _overrides(pretrain))
            kwargs = one_line(plain(cfg.BACKBONE.KWARGS))
            words = ["random", "--arch", cfg.BACKBONE.NAME, "--arch-kwargs", kwargs, *words[1:]]
        place = words.index("--output-dir") + 1
        return (stage.program, "--check", *words[:place], output_dir, *words[place + 1 :])
    if stage.kind == "pretrain":
        words += ["OUTPUT_DIR", output_dir]
    elif stage.program == "kscl-linear-eval":
        if pretrain is not None and pretrain.folder in missing:
            words, later = _without(words, ("BACKBONE.WEIGHTS",)), [*later, "BACKBONE.WEIGHTS"]
    elif stage.kind == "detection":
        convert = next(need for need in stage.needs if need.kind == "convert")
        place = words.index("--config-file") + 1
        words[place] = _value(convert, "--protocol")
        words += ["OUTPUT_DIR", output_dir]
        later = [*later, "MODEL.WEIGHTS"]
    else:
        return None
    return (stage.program, "--check", *(w for p in later for w in ("--check-later", p)), *words)


def _without(words: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the words without these keys and their values."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in keys:
            skip = True
        else:
            kept.append(word)
    return kept


def _value(stage: Stage, option: str) -> str:
    return stage.arguments[stage.arguments.index(option) + 1]


def _overrides(pretrain: Stage) -> list[str]:
    """Return the KEY VALUE words, which follow the options."""
    return list(pretrain.arguments[pretrain.arguments.index("--num-gpus") + 2 :])


def _report(said: Said) -> tuple[list[str], float | None]:
    """Return the fatal problems of a check, and the seconds of the stage if it tells them."""
    output, errors = said
    try:
        report = json.loads(output[output.index("{") :])
    except ValueError:
        return [(errors or output).strip()[-2000:]], None
    fatal = [_in_words(problem) for problem in report["problems"] if problem["fatal"]]
    return fatal, report.get("seconds")


def _in_words(problem: dict[str, str]) -> str:
    if not problem.get("fix"):
        return problem["what"]
    return f"{problem['where']}: {problem['what']}. {problem['fix']}."


def _passed(state_dir: Path) -> set[str]:
    try:
        return set((state_dir / PASSED_FILE).read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return set()


def refuse(problems: Sequence[str]) -> None:
    """Raise one KsclError with all problems, if there are any."""
    if problems:
        listed = "\n".join(f"  {text}" for text in dict.fromkeys(problems))
        raise KsclError(f"The suite cannot run as it is; nothing was started:\n{listed}")
