"""What preflight found: problems that stop a run, notes that do not, and the sets themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kscl.data.annotated.annotations import AnnotatedSet, Problem, list_problems
from kscl.data.annotated.specs import Source
from kscl.errors import KsclError


@dataclass
class Report:
    """What was found; `problems` holds notes too, which are not fatal."""

    class_names: tuple[str, ...] = ()
    sets: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    absent_from_test: tuple[str, ...] = ()
    # Reasons by path of unreadable training images, few enough for a run to skip them.
    skipped: dict[str, str] = field(default_factory=dict, repr=False)
    # The sets themselves by role, for the run that follows: nothing is read a second time.
    annotated: dict[str, list[tuple[Source, AnnotatedSet]]] = field(
        default_factory=lambda: {"train": [], "test": []}, repr=False
    )

    @property
    def fatal(self) -> list[Problem]:
        """The problems that stop a run."""
        return [problem for problem in self.problems if problem.fatal]

    @property
    def notes(self) -> list[Problem]:
        """The problems that stop nothing."""
        return [problem for problem in self.problems if not problem.fatal]

    def checked(self) -> Report:
        """Return this report, or raise one error with every problem."""
        if self.fatal:
            count = len(self.fatal)
            raise KsclError(
                f"Preflight found {count} problem{'s' if count > 1 else ''} in the data; nothing "
                f"was started:\n{list_problems(self.fatal)}"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the sets themselves, for JSON."""
        return {
            "class_names": self.class_names,
            "sets": self.sets,
            "problems": [vars(problem) for problem in self.problems],
            "absent_from_test": self.absent_from_test,
            "good": not self.fatal,
        }

    def __str__(self) -> str:
        lines = [f"Classes ({len(self.class_names)}): {', '.join(self.class_names)}"]
        for row in self.sets:
            lines.append(
                f"{row['role']:>5}  {row['name']}: {row['images']} images, {row['objects']} objects"
                f" ({row['difficult']} difficult), {_decoded(row)}"
            )
        if self.notes:
            lines.append(f"Notes ({len(self.notes)}):\n{list_problems(self.notes)}")
        if self.fatal:
            lines.append(f"Problems ({len(self.fatal)}):\n{list_problems(self.fatal)}")
        else:
            lines.append("No problem found.")
        return "\n".join(lines)


def _decoded(row: dict[str, Any]) -> str:
    if row["decoded"] == row["images"] + row["skipped"]:
        return "all decoded"
    return f"a sample of {row['decoded']} decoded"
