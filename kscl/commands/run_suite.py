"""Run a suite: pretraining, probes, conversion, detection and the leaderboard, from one file.

Finished stages are kept, changed ones run again, and a failure stops only what depends on it. After
an interruption, the same command resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kscl import cli
from kscl.benchmark.slurm import (
    active_jobs,
    cancel_all,
    missing_stages,
    read_profile,
    scripts_text,
    set_statuses,
    submit_all,
)
from kscl.benchmark.suite.check import check_stages, different_networks, fetch_weights, refuse
from kscl.benchmark.suite.execute import (
    FAILED,
    STOPPED,
    TO_DO,
    WAITS,
    State,
    look,
    mark_running,
    run_stages,
    set_aside,
)
from kscl.benchmark.suite.progress import (
    FORMATS,
    CheckProgress,
    Progress,
    commands_text,
    report_seconds,
    seconds_of,
    table,
    tail,
)
from kscl.benchmark.suite.spec import Suite, only, read_suite
from kscl.benchmark.suite.stages import Stage, of_contenders, plan
from kscl.errors import KsclError
from kscl.runtime.files import only_run_in
from kscl.runtime.machine import usable_cores

EXAMPLES = """  kscl run configs/suites/demo.yaml
  kscl run output/mine/suite.yaml --num-seeds 3
  kscl run configs/suites/own_data.yaml --dry-run
  kscl run configs/suites/public_checkpoints.yaml --only moco_v2 swav
  kscl run configs/suites/paper.yaml --print-commands --format sh > jobs.sh
  kscl run configs/suites/paper.yaml --slurm configs/slurm/example.yaml
  kscl run configs/suites/paper.yaml --status
"""
STATE_FOLDER = ".stages"
HOW_TO_CONTINUE = "Stopped. Run it again to continue."


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("suite", metavar="FILE", help="a suite; see configs/suites/")
    about = "run only these contenders; the leaderboard still shows finished results of the others"
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help=about)
    about = (
        "show what is done, running and left, and the time it may take; with --slurm, the scripts"
    )
    cli.add_flag(parser, "--dry-run", about)
    about = "print the commands of all stages, in order, for another scheduler"
    cli.add_flag(parser, "--print-commands", about)
    about = "format of --print-commands: a list, or a shell script with dependencies"
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=about)
    about = "stages to run at the same time (default: the suite's)"
    parser.add_argument("--jobs", type=int, metavar="N", help=about)
    about = "run seeds 0 to N - 1 instead of the suite's; finished ones are kept"
    parser.add_argument("--num-seeds", type=int, metavar="N", help=about)
    about = "start without first checking the config, data and network of every stage"
    cli.add_flag(parser, "--skip-check", about)
    cli.add_insert(parser)
    about = "submit every missing stage as a SLURM job; see configs/slurm/"
    parser.add_argument("--slurm", metavar="PROFILE", help=about)
    cli.add_flag(parser, "--status", "show the stages of a suite that SLURM runs")
    cli.add_flag(parser, "--cancel", "cancel the jobs of a suite that SLURM runs")
    arguments = parser.parse_args(argv)
    if arguments.num_seeds is not None and arguments.num_seeds < 1:
        raise KsclError(f"--num-seeds must be at least 1, got {arguments.num_seeds}.")
    suite = read_suite(arguments.suite, num_seeds=arguments.num_seeds)
    chosen = only(suite, arguments.only) if arguments.only else suite
    looks = arguments.print_commands or arguments.status or arguments.cancel
    looks = looks or (arguments.dry_run and arguments.skip_check)
    problems = [] if looks else fetch_weights(chosen)
    if not arguments.dry_run:
        refuse(problems)
    if not looks and (warning := different_networks(chosen)):
        print(warning, file=sys.stderr)
    stages = plan(suite)
    if arguments.only:
        stages = of_contenders(stages, chosen.contenders)
    if arguments.insert:
        if arguments.slurm or arguments.print_commands:
            raise KsclError(
                "--insert needs all results: give it to this command without --slurm and "
                "--print-commands, once all stages are done."
            )
        board = stages[-1]
        stages[-1] = replace(board, options=(*board.options, ("insert", arguments.insert)))
    state_dir = Path(suite.output_dir) / STATE_FOLDER
    if arguments.print_commands:
        print(commands_text(stages, state_dir, arguments.format), end="")
        return 0
    if arguments.slurm or arguments.status or arguments.cancel:
        return _on_slurm(arguments, suite, stages, state_dir)
    states = look(stages, state_dir)
    jobs = max(1, arguments.jobs or suite.jobs)
    if not (problems or arguments.skip_check):
        at_once = max(jobs, usable_cores())
        try:
            problems = check_stages(
                *(states, state_dir, suite.output_dir, at_once),
                estimate=arguments.dry_run,
                show=CheckProgress(),
            )
        except KeyboardInterrupt:
            print(f"\n{HOW_TO_CONTINUE}")
            return cli.EXIT_INTERRUPTED
    if arguments.dry_run:
        mark_running(states)
        print(table(states, jobs))
    refuse(problems)
    if arguments.dry_run:
        return 0
    board_file = Path(suite.output_dir) / suite.board / "leaderboard.txt"
    earlier = _changed_at(board_file)
    code = run_stages(states, state_dir, Progress(jobs), jobs)
    if any(state.status == STOPPED for state in states):
        print(HOW_TO_CONTINUE)
        return code
    _print_failures(states)
    if code and arguments.insert:
        print(f"Something failed, so nothing was written into {arguments.insert[0]}.")
    if suite.steps:
        print(report_seconds(seconds_of(stages)))
    if _changed_at(board_file) != earlier:  # one of an earlier run would be taken for this one's
        print(f"\n{board_file.read_text()}\nThe page is {board_file.with_suffix('.html')}")
    return code


def _on_slurm(
    arguments: argparse.Namespace, suite: Suite, stages: list[Stage], state_dir: Path
) -> int:
    """Submit, show or cancel the jobs of a suite."""
    profile = read_profile(arguments.slurm) if arguments.slurm else None
    only_looks = arguments.dry_run or (arguments.status and not arguments.cancel)
    with contextlib.nullcontext() if only_looks else only_run_in(state_dir, "output_dir"):
        # squeue first: a job that ends between the two has left its note.
        try:
            jobs = active_jobs()
        except KsclError as error:
            if not arguments.dry_run:
                raise
            jobs = {}
            print(f"# As if no job were queued: {error}".replace("\n", "\n# "))
        states = look(stages, state_dir)
        set_statuses(states, state_dir, jobs)
        if arguments.cancel:
            cancelled = cancel_all(states, state_dir, jobs)
            print(f"Cancelled: {', '.join(cancelled) or 'nothing was queued'}.")
            return 0
        if arguments.status or profile is None:
            print(table(states))
            _print_failures(states)
            return 1 if any(state.status in (FAILED, WAITS) for state in states) else 0
        if arguments.dry_run:
            print(scripts_text(states, profile, state_dir, Path.cwd()), end="")
        missing = missing_stages(states)
        if missing and not arguments.skip_check:
            cores = usable_cores()
            refuse(check_stages(states, state_dir, suite.output_dir, cores, show=CheckProgress()))
        if arguments.dry_run:
            return 0
        for state in states:
            if state.is_outdated and state.status in (TO_DO, FAILED, WAITS):
                set_aside(state.stage, is_outdated=True)
        submitted = submit_all(missing, profile, state_dir, jobs, Path.cwd())
    for name, number in submitted.items():
        print(f"{name}: job {number}")
    print(f"Submitted {len(submitted)} of {len(stages)} stages. --status shows how far they are.")
    return 0


def _print_failures(states: list[State]) -> None:
    for state in states:
        if state.status == FAILED and state.log is not None:
            print(f"\n{state.stage.name} failed. The end of {state.log}:\n{tail(state.log)}")
    if waiting := [state.stage.name for state in states if state.status == WAITS]:
        print(f"\nNot run, as a stage before failed: {', '.join(waiting)}")


def _changed_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None
