"""The `kscl` command: verbs, grouped by what one wants to do, and the modules that run them.

A module is imported when its verb is used, so that nobody waits for a --help.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kscl import cli
from kscl.errors import KsclError

HELP = (["-h"], ["--help"])
USAGE = """usage: kscl VERB [ARGUMENT ...]

K-shot contrastive pretraining, and its transfer to Detectron2 detectors.
{verbs}
`kscl VERB --help` shows the options of a verb, with examples. `kscl --version` prints version and
commit. For completion of verbs and options in bash: eval "$(kscl --completion)". In zsh, first run
autoload -U bashcompinit && bashcompinit
"""
COMPLETION = """_kscl() {{
  local verb="${{COMP_WORDS[1]}}" words=""
  if [ "$verb" = visualize ] && [ "$COMP_CWORD" -gt 2 ]; then verb="$verb ${{COMP_WORDS[2]}}"; fi
  case "$COMP_CWORD:$2" in
    1:*) words="{verbs}" ;;
    *:-*) words="$(kscl $verb --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]+' | sort -u)" ;;
    2:*) [ "$verb" != visualize ] || words="{drawn}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _kscl kscl
"""


class Verb(NamedTuple):
    """What runs a verb."""

    module: str  # of the command; its `main` is called
    help: str
    words: tuple[str, ...] = ()  # arguments that come before the user's


GROUPS = {
    "Try it": {
        "demo": Verb(
            "kscl.commands.run_suite",
            "run the whole chain on a drawn data set, down to the leaderboard",
            ("configs/suites/demo.yaml",),
        ),
        "doctor": Verb(
            "kscl.commands.doctor", "show what is installed, what is missing and how to fix it"
        ),
        "install-detectron2": Verb("detection.install", "install Detectron2 into this Python"),
    },
    "Prepare data": {
        "prepare": Verb(
            "kscl.commands.prepare_data",
            "check and lay out data: your own, VOC, CIFAR-10 and others",
        ),
        "shapes": Verb("kscl.commands.make_shapes", "draw the data set of textured shapes"),
        "preflight": Verb("detection.commands.preflight", "check detection data before a run"),
    },
    "Compare methods": {
        "start": Verb("kscl.commands.start", "write a suite that fits your data and your time"),
        "run": Verb("kscl.commands.run_suite", "run or resume a suite, here or on SLURM"),
        "board": Verb("kscl.commands.leaderboard", "make the leaderboard from run records"),
        "compare": Verb("kscl.commands.compare", "print how rows of the board differ"),
        "equal-time": Verb(
            "kscl.commands.equal_time", "give all contenders of a suite the same training time"
        ),
    },
    "Run one step": {
        "pretrain": Verb("kscl.commands.pretrain", "pretrain a backbone"),
        "probe": Verb(
            "linear_eval.commands.linear_eval",
            "evaluate a backbone: linear probes, neighbors, SVMs, segmentation, few labels",
        ),
        "convert": Verb("detection.commands.convert", "convert a backbone for Detectron2"),
        "train-net": Verb("detection.commands.train_net", "fine-tune and score a detector"),
        "score": Verb("detection.commands.score", "score saved detections again"),
    },
    "Use and look at results": {
        "predict": Verb(
            "detection.commands.predict", "find objects in photos with a trained detector"
        ),
        "export": Verb("kscl.commands.export", "export a backbone for use elsewhere"),
        "visualize basis": Verb(
            "kscl.commands.visualize_basis", "draw what the subspace of an image holds"
        ),
        "visualize training": Verb("kscl.commands.visualize_training", "draw training curves"),
        "visualize detections": Verb(
            "detection.commands.visualize_detections", "draw what a detector found, and its AP"
        ),
    },
    "Share results": {
        "reproduce": Verb("kscl.commands.reproduce", "rerun a result from its record and compare"),
        "submit": Verb("kscl.commands.submit", "pack records for a pull request"),
        "check-submission": Verb(
            "kscl.commands.check_submission", "check the submissions in results/"
        ),
    },
    "Know the cost": {
        "plan": Verb("kscl.commands.plan", "estimate memory and time of a pretraining run"),
        "profile": Verb("kscl.commands.profile_step", "measure where the time of a step goes"),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
VERB_OF = {verb.module: name for name, verb in VERBS.items() if not verb.words}


def python_words(*words: str) -> list[str]:
    """Return the words that run `kscl` in this Python, installed as a script or not."""
    return [sys.executable, "-P", "-m", "kscl", *words]


def run(verb: str) -> None:
    """Run a verb with the words of the command line: what a script in tools/ does."""
    raise SystemExit(main([*verb.split(), *sys.argv[1:]]))


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of a verb."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given in HELP:
        print(_usage(), end="")
        return 0
    if given == ["--version"]:
        from kscl.records.provenance import code_version

        code = code_version()
        changed = ", with changes" if code["dirty"] else ""
        print(f"kscl {code['version']} (commit {code['commit'] or 'unknown'}{changed})")
        return 0
    if given == ["--completion"]:
        first = dict.fromkeys(name.split()[0] for name in VERBS)
        drawn = [name.split()[1] for name in VERBS if name.startswith("visualize ")]
        print(COMPLETION.format(verbs=" ".join(first), drawn=" ".join(drawn)), end="")
        return 0
    length = 1 if given[0] in VERBS else 2
    name, rest = " ".join(given[:length]), given[length:]
    if name in VERBS:
        verb = VERBS[name]
        words = () if rest in HELP else verb.words
        # The command's parser reads its name from here, and `detection` whether it is for help.
        sys.argv = [str(Path(sys.argv[0]).parent / f"kscl {name}"), *words, *rest]
        return importlib.import_module(verb.module).main() or 0
    family = [known for known in VERBS if known.startswith(f"{given[0]} ")]
    if family and given[1:] in ([], *HELP):
        print(_usage(f"{given[0]} "), end="")
        return 0
    wanted = name if family else given[0]
    tools = {module.split(".")[-1].replace("_", "-"): verb for module, verb in VERB_OF.items()}
    known = dict(zip(VERBS, VERBS, strict=True)) | tools
    (nearest,) = difflib.get_close_matches(wanted, family or known, n=1, cutoff=0)
    raise KsclError(
        f"There is no verb '{wanted}'. The nearest is `kscl {known[nearest]}`; `kscl --help` lists "
        "all."
    )


def _usage(start: str = "") -> str:
    """Return the help, of all verbs or of those that start so."""
    width = max(map(len, VERBS)) + 2
    lines = []
    for title, group in GROUPS.items():
        if shown := {name: verb for name, verb in group.items() if name.startswith(start)}:
            lines += ["", f"{title}:"]
            lines += [f"  {name:<{width}}{verb.help}" for name, verb in shown.items()]
    return USAGE.format(verbs="\n".join([*lines, ""]))
