"""Kill the tools and feed them broken files, with a fresh random seed each time (`make attack`).

    python -m tests.attack [--minutes 20] [--seed N] [--only NAME ...]

Every attempt ends in one of four ways: `equal` (the numbers of an undisturbed run), `refused` (an
error that a person can read, and nothing else), `accepted` (the file was changed into other valid
input), or `failed`: a traceback, a hang, a death, or a finished run with other numbers.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.attack.attacks import KILLED, VICTIMS, Tally, damage, kill
from tests.attack.chain import build_chain

SIDE_BY_SIDE = 2
ATTACKS = {  # kills take longer, so there is one for about three broken files
    **{f"kill {kind}": (kill, kind) for kind in KILLED},
    **{f"broken {name}": (damage, name) for name in VICTIMS},
}


def main() -> int:
    """Attack until the time is over; return 1 if an attempt failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--only", nargs="+", choices=sorted(ATTACKS), metavar="NAME")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    tally, chosen = Tally(), given.only or list(ATTACKS)
    with tempfile.TemporaryDirectory(prefix="kscl-attack-") as name:
        begun = time.monotonic()
        chain = build_chain(Path(name))
        print(f"built the chain in {time.monotonic() - begun:.0f} s", flush=True)

        def attempt(number: int) -> None:
            if time.monotonic() - begun > 60 * given.minutes:
                return
            which, place = chosen[number % len(chosen)], Path(name) / f"attempt{number}"
            place.mkdir()
            attack, name_of_target = ATTACKS[which]
            chance = random.Random(f"{given.seed}/{number}")
            outcome, about = attack(chain, name_of_target, chance, place)
            tally.add(which, outcome, f"attempt {number}: {about}")
            print(f"{number:4d} {which}: {outcome}", flush=True)
            shutil.rmtree(place)

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(attempt, range(10_000)))
    print(f"\n{tally.table()}\n")
    for failure in tally.failures:
        print(f"FAILED {failure}\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
