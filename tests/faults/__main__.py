"""`python -m tests.faults [--only PLACE] [--count N --seed S]`: live the matrix; write its table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .matrix import all_cases, live_through, some_cases, table
from .situations import Untouched


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill real runs at every crash point, and compare.")
    parser.add_argument("--only", help="crash points that begin with this, or whose event does")
    parser.add_argument("--count", type=int, help="so many, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("faults.md"))
    options = parser.parse_args()
    cases = some_cases(options.seed, options.count) if options.count else all_cases()
    only = options.only or ""
    cases = [case for case in cases if any(part.startswith(only) for part in (case.place, case.kind))]
    with tempfile.TemporaryDirectory(prefix="surefoot-faults-") as folder:
        print(f"{len(cases)} cases; before the first of a config, the run that nobody touches", flush=True)
        untouched = Untouched(Path(folder))
        verdicts = []
        for number, case in enumerate(cases, 1):
            verdict = live_through(case, untouched, Path(folder) / "runs")
            verdicts.append(verdict)
            said = "ok" if verdict.ok else f"FAILED {verdict.said}"
            print(f"{number}/{len(cases)} {case.name}: {said}  {verdict.seconds:.0f} s", flush=True)
            options.out.write_text(table(verdicts))
    print(table(verdicts))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
