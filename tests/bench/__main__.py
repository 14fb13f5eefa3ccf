"""Measure, print the table, write bench.json into the current folder.

python -m tests.bench [--only GROUP]... [--quick] [--events N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from . import appends, engine, reading, recovery, stalls, updates
from .figures import Bench, Figure, table
from .workload import make_model

GROUPS: dict[str, Callable[[Bench], list[Figure]]] = {
    "updates": updates.measure,
    "appends": appends.measure,
    "reading": reading.measure,
    "engine": engine.measure,
    "recovery": recovery.measure,
    "stalls": stalls.measure,
}
NEED_THE_MODEL = {"updates", "recovery"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description="Ratios, each measured in one run.")
    parser.add_argument("--only", action="append", choices=list(GROUPS), help="this group; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small numbers: whether it works, not how fast")
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the log that is read")
    parser.add_argument("--keep", action="store_true", help="keep the scratch folder")
    arguments = parser.parse_args()
    began = time.monotonic()
    load_before, processors = os.getloadavg()[0], os.cpu_count() or 1
    wanted = arguments.only or list(GROUPS)
    runs = Path("runs").absolute()  # the filesystem that runs lie on
    runs.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=runs))
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    try:
        model = folder / "model"
        if NEED_THE_MODEL & set(wanted):
            model = make_model(model, taught_steps=5 if arguments.quick else 150)
        bench = Bench(folder, model, arguments.quick, arguments.events)
        for name in wanted:
            bench.say(f"{name} ({time.monotonic() - began:.0f} s)")
            try:
                figures += GROUPS[name](bench)
            except Exception as error:  # the other figures are worth having
                failed[name] = f"{type(error).__name__}: {error}"
                print(f"  !! {name}: {failed[name]}", file=sys.stderr, flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    written = {
        "machine": {
            "processors": processors,
            "load_before": load_before,
            "idle": load_before < processors / 4,
            "platform": platform.platform(),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
        "quick": arguments.quick,
        "seconds": seconds,
        "failed": failed,
        "figures": {figure.name: figure.as_json() for figure in figures},
    }
    Path("bench.json").write_text(json.dumps(written, indent=1) + "\n")
    print(table(figures))
    print(f"\nbench.json written after {seconds:.0f} s")
    if load_before >= processors / 4:
        print(
            f"NOT TO BE QUOTED: others were at work, load {load_before:.1f} on {processors} processors before"
        )
    if arguments.quick:
        print("NOT TO BE QUOTED: quick")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
