"""Submit what is missing of a suite, never the same stage twice; show and cancel its jobs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kscl.benchmark.slurm.profile import Profile
from kscl.benchmark.slurm.queue import AT_WORK, WAITS_AFTER_REQUEUE, Job, cancel, submit
from kscl.benchmark.slurm.script import batch_script, script_folder, script_path
from kscl.benchmark.suite.execute import DONE, FAILED, RUNNING, TO_DO, WAITS, State, note_path
from kscl.benchmark.suite.stages import Stage
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

QUEUED, REQUEUED = "queued", "queued again"
LANE = "lane"

Jobs = Mapping[Path, Job]


def set_statuses(states: Sequence[State], state_dir: Path, jobs: Jobs) -> None:
    """Complete what the notes say: what runs, waits, or has ended without a note."""
    by_stage = {id(state.stage): state for state in states}
    for state in states:
        script = script_path(state_dir, state.stage)
        job = jobs.get(script)
        needs = {by_stage[id(stage)].status for stage in state.stage.needs}
        if job is not None:
            state.status = _status(job)
        elif state.stage.kind == "board":
            if note_path(state_dir, state.stage).exists():
                state.status = DONE
            elif _submission(script).exists():
                state.status = FAILED
        elif state.status == TO_DO and needs & {FAILED, WAITS}:
            state.status = WAITS
        elif state.status == TO_DO and _submission(script).exists():
            state.status = FAILED


def _status(job: Job) -> str:
    if job.state in AT_WORK:
        return RUNNING
    return REQUEUED if job.reason == WAITS_AFTER_REQUEUE else QUEUED


def missing_stages(states: Sequence[State]) -> list[Stage]:
    """Return the stages to submit, each after those it needs."""
    *others, board = states
    left = [s.stage for s in others if s.status in (TO_DO, FAILED, WAITS)]
    return [*left, board.stage] if left or board.status in (TO_DO, FAILED) else []


def submit_all(
    stages: Sequence[Stage], profile: Profile, state_dir: Path, jobs: Jobs, cwd: Path
) -> dict[str, str]:
    """Submit the stages; return the number of each job by the name of its stage.

    With a limit on jobs at once, every job is put into one of so many lanes and waits for the one
    before it there, however that ends. What needs the fewest others goes first, so that no lane
    waits behind a job that itself waits for another lane while there is other work.
    """
    numbers = {path: job.number for path, job in jobs.items()}
    lanes = _Lanes(profile.max_jobs, state_dir, jobs)
    submitted = {}
    for stage in sorted(stages, key=_depth):
        script = script_path(state_dir, stage)
        if stage.kind == "board" and script in numbers:
            cancel([numbers[script]])  # that one does not wait for what is submitted now
        note_path(state_dir, stage).unlink(missing_ok=True)  # of a result that is gone
        lane, before = (None, "") if stage.kind == "board" else lanes.shortest()
        clauses = dependencies(stage, state_dir, numbers, before)
        text = batch_script(stage, profile, state_dir, clauses, cwd)
        write_atomically(script, text.encode())
        write_atomically(_submission(script), json.dumps({LANE: lane}).encode())
        try:
            numbers[script] = submitted[stage.name] = submit(script)
        except KsclError:
            _submission(script).unlink()
            raise
        if lane is not None:
            lanes.put(lane, numbers[script])
    return submitted


def _depth(stage: Stage) -> int:
    return 1 + max(map(_depth, stage.needs), default=0)


def dependencies(
    stage: Stage, state_dir: Path, numbers: Mapping[Path, str], before: str = ""
) -> list[str]:
    """Return what a job waits for: its needs and the job before it in its lane.

    The leaderboard is made however its needs end; a stage only if all of them are done.
    """
    needs = [numbers.get(script_path(state_dir, need)) for need in stage.needs]
    active = list(dict.fromkeys(number for number in needs if number))
    clauses = []
    if active:
        condition = "afterany" if stage.kind == "board" else "afterok"
        clauses.append(":".join([condition, *active]))
    if before and before not in active:
        clauses.append(f"afterany:{before}")
    return clauses


class _Lanes:
    """As many chains of jobs as may run at once."""

    def __init__(self, count: int, state_dir: Path, jobs: Jobs) -> None:
        self.count = count
        self.last: dict[int, str] = {}
        self.length: Counter[int] = Counter()
        for path, job in sorted(jobs.items(), key=lambda item: int(item[1].number.split("_")[0])):
            lane = _lane_of(path) if path.parent == script_folder(state_dir) else None
            if lane is not None:
                self.put(lane, job.number)

    def shortest(self) -> tuple[int | None, str]:
        """Return the lane with the fewest jobs, and its last one."""
        if not self.count:
            return None, ""
        lane = min(range(self.count), key=lambda number: (self.length[number], number))
        return lane, self.last.get(lane, "")

    def put(self, lane: int, number: str) -> None:
        """Add a job to the end of a lane."""
        self.last[lane] = number
        self.length[lane] += 1


def _submission(script: Path) -> Path:
    """Return the file which says that a stage was submitted, and into which lane."""
    return script.with_suffix(".job")


def _lane_of(script: Path) -> int | None:
    try:
        lane = json.loads(_submission(script).read_text())[LANE]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return lane if isinstance(lane, int) else None


def cancel_all(states: Sequence[State], state_dir: Path, jobs: Jobs) -> list[str]:
    """Cancel the jobs of the suite, the leaderboard first; return the names of their stages."""
    cancelled = []
    numbers = []
    for state in reversed(states):
        script = script_path(state_dir, state.stage)
        if script in jobs:
            numbers.append(jobs[script].number)
            cancelled.append(state.stage.name)
            _submission(script).unlink(missing_ok=True)
    cancel(numbers)
    return cancelled


def scripts_text(states: Sequence[State], profile: Profile, state_dir: Path, cwd: Path) -> str:
    """Return the scripts that would be submitted, with the names of stages for numbers of jobs."""
    names = {script_path(state_dir, s.stage): s.stage.name for s in states if s.status != DONE}
    parts = []
    for stage in missing_stages(states):
        clauses = dependencies(stage, state_dir, names)
        text = batch_script(stage, profile, state_dir, clauses, cwd)
        parts.append(f"# {stage.name}: {script_path(state_dir, stage)}\n{text}")
    return "\n".join(parts) or "Nothing is missing.\n"
