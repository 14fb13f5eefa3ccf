"""The command line: thin commands over the library, one line for every error, an exit code for every end.

Owns standard output and error, and nothing else. Only `train`, `replay` and `export` import torch or Ray,
and only once they need them; every import that is not small is inside its command.

Exit codes: 0 done, or already complete (which one is said); 1 failed; 2 the user's mistake; 3 stopped short;
75 preempted, also if the database was away and the log could not be told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..statemachine.errors import SurefootError, UserMistake, described
from .places import RUNS
from .signals import AtSignal

FAILED, MISTAKE, PREEMPTED = 1, 2, 75
FOLLOW_SECONDS = 0.2

app = typer.Typer(
    name="surefoot",
    help="Asynchronous reinforcement-learning post-training, every step in a log.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A TOML file; docs/config.md lists its keys.")
]
MoreSets = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="More overrides, each as if after a --set.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be given again.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The run.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Where runs' folders are.")]
Database = Annotated[
    str | None, typer.Option("--db", metavar="URL", help="A shared database for the log, instead of a file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Update = Annotated[
    int | None, typer.Option("--update", metavar="K", help="The update; the last one unless given.")
]


@app.command()
def plan(
    config: ConfigFile,
    more: MoreSets = None,
    sets: Sets = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = RUNS,
    db: Database = None,
    debug: Debug = False,
) -> int:
    """Print the budget, its derivation and the learning rates; start nothing."""
    from .config import load_config
    from .plan import plan_dict, plan_lines, prepare

    prepared = prepare(load_config(config, _sets(sets, more)))
    if as_json:
        _print_json(plan_dict(prepared))
    else:
        _print(plan_lines(prepared))
    return 0


@app.command()
def train(
    config: ConfigFile,
    more: MoreSets = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="The run's name; the config file's unless given."),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Take the next free name.")] = False,
    sets: Sets = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run even from a driver that lives; it is fenced.")
    ] = False,
    accept_divergence: Annotated[
        bool,
        typer.Option("--accept-divergence", help="Go on though a redo differs from its record; recorded."),
    ] = False,
    runs_dir: RunsDir = RUNS,
    db: Database = None,
    debug: Debug = False,
) -> int:
    """Start the run, or go on with it if it exists."""
    with AtSignal(PREEMPTED, "asked to stop before the run had begun: run it again"):
        from .config import load_config
        from .places import Place, next_free
        from .terminal import drive

        name = config.stem if run is None else run
        place = next_free(name, runs_dir, db) if new else Place(name, runs_dir, db)
        return drive(
            load_config(config, _sets(sets, more)),
            place,
            take_over=take_over,
            accept_divergence=accept_divergence,
        )


@app.command()
def runs(as_json: AsJson = False, runs_dir: RunsDir = RUNS, db: Database = None, debug: Debug = False) -> int:
    """List the runs: phase, step x of y, age of the last event, whether a driver has them."""
    from .places import all_places
    from .views import runs_lines, view_of

    views = [view for place in all_places(runs_dir, db) if (view := view_of(place)) is not None]
    if as_json:
        _print_json(views)
    elif views:
        _print(runs_lines(views))
    else:
        _print([f"no runs yet in {runs_dir if db is None else 'this database'}: `surefoot train` begins one"])
    return 0


@app.command()
def log(
    name: Name,
    as_json: AsJson = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with new events until the run ends.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    db: Database = None,
    debug: Debug = False,
) -> int:
    """Print the events; with --json one object a line."""
    import shutil
    import time

    from ..statemachine.log import follow as follow_log
    from .places import Place
    from .views import END_TYPES, refuse_to_wait, row_json, row_line

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
    last_type, last_seq = "", 0

    def wait() -> bool:
        if not follow or last_type in END_TYPES:
            return False
        sys.stdout.flush()
        refuse_to_wait(opened.head(name), last_seq)
        time.sleep(FOLLOW_SECONDS)
        return True

    with Place(name, runs_dir, db).reading() as opened:
        try:
            for row in follow_log(opened, name, wait=wait):
                last_type, last_seq = row.type, row.seq
                print(row_json(row) if as_json else row_line(row, width))
        except KeyboardInterrupt:
            if not follow:
                raise
    return 0


@app.command()
def samples(
    name: Name,
    update: Update = None,
    group: Annotated[
        int | None, typer.Option("--group", metavar="I", help="One group, by prompt index.")
    ] = None,
    runs_dir: RunsDir = RUNS,
    db: Database = None,
    debug: Debug = False,
) -> int:
    """Print decoded prompts, responses, rewards, versions and attempts of trained groups."""
    from ..rollout.store import FsspecGroupStore
    from ..rollout.tokens import load_tokenizer
    from .places import Place
    from .views import SampleSource, sample_lines

    place = Place(name, runs_dir, db)
    with place.reading() as opened:
        source = SampleSource.of(opened.read(name))
    tokenizer = load_tokenizer(source.config.model.path)
    where = place.storage_url(source.config)
    store = FsspecGroupStore(where)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    for number, prompt_index, attempt in source.chosen(update, group):
        _print(sample_lines(number, source.read(store, prompt_index, attempt, where), decode))
    return 0


@app.command()
def audit(
    name: Name, as_json: AsJson = False, runs_dir: RunsDir = RUNS, db: Database = None, debug: Debug = False
) -> int:
    """Recompute a run from its log and say whether every identity holds."""
    import msgspec

    from ..statemachine.audit import audit as audit_rows
    from ..statemachine.folded import folding
    from .places import Place
    from .views import audit_lines

    place = Place(name, runs_dir, db)
    with place.reading() as opened:
        head = opened.head(name)
        with folding(opened, place.log_url, name, head.head_seq) as folded:
            report = audit_rows(opened.read(name), head, folded)
            if opened.head(name).head_seq != head.head_seq:
                # Events came meanwhile, from a driver that lives: what the head already held is audited.
                report = audit_rows(opened.read(name, limit=head.head_seq), head, folded)
    if as_json:
        _print_json(msgspec.to_builtins(report))
    else:
        _print(audit_lines(report))
    return 0 if report.ok else FAILED


@app.command()
def replay(
    name: Name,
    from_update: Annotated[
        int | None,
        typer.Option("--from", metavar="UPDATE", help="The first update to compare; the first kept one."),
    ] = None,
    as_json: AsJson = False,
    runs_dir: RunsDir = RUNS,
    db: Database = None,
    debug: Debug = False,
) -> int:
    """Execute recorded updates again on fresh learner ranks and compare every number with the log."""
    import asyncio

    from .places import Place
    from .replay import replay_run
    from .terminal import replay_progress

    place = Place(name, runs_dir, db)
    with place.reading() as opened:
        rows = list(opened.read(name))
    with replay_progress() as progress:
        done = asyncio.run(replay_run(rows, place.storage_url, from_update, progress))
    if as_json:
        _print_json(done.to_json())
    else:
        _print(done.lines())
    return 0 if done.ok else FAILED


@app.command()
def export(
    name: Name,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; must not exist yet.")],
    update: Annotated[
        int | None,
        typer.Option("--update", metavar="K", help="A kept checkpoint's update; the last one unless given."),
    ] = None,
    runs_dir: RunsDir = RUNS,
    db: Database = None,
    debug: Debug = False,
) -> int:
    """Write the weights as a transformers folder that from_pretrained loads."""
    from .export import export as export_run
    from .places import Place

    print(export_run(Place(name, runs_dir, db), folder, update))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises, but with --debug."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # reward functions may lie in the folder that the command runs in
    try:
        code = app(arguments, prog_name="surefoot", standalone_mode=False)
        code = code if isinstance(code, int) else 0
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _forget_stdout()
        return code
    except (BrokenPipeError, SystemExit):  # the second is typer's form of the first
        _forget_stdout()
        return 0
    except BaseException as error:
        if "--debug" in arguments:
            raise
        return _report(error)


def _forget_stdout() -> None:
    """Whoever read our output has read enough; what is left unwritten must not be tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: BaseException) -> int:
    if isinstance(error, typer.TyperException):
        usage = f"{error.format_message().rstrip('.')}; `surefoot --help` shows what there is"
        message, code = _mistyped(error) or usage, MISTAKE
    elif isinstance(error, SurefootError):
        message, code = str(error), MISTAKE if isinstance(error, UserMistake) else FAILED
    elif isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", 130
    else:
        message, code = described(error), FAILED
        if message == str(error):
            message = f"{type(error).__name__}: {message} (--debug shows where)"
    print(f"surefoot: {' '.join(message.split())}", file=sys.stderr)
    return code


def _mistyped(error: typer.TyperException) -> str | None:
    """What is said of an option's value of the wrong type, which the message of typer does not name."""
    from pydantic import ValidationError

    if not isinstance(error.__cause__, ValidationError) or not isinstance(error, typer.BadParameter):
        return None
    first, option = error.__cause__.errors()[0], error.param.get_error_hint() if error.param else "value"
    rule = first["msg"].partition(",")[0].removeprefix("Input ").replace("should be", "must be")
    return f"{option.strip(chr(39))} {first['input']}: {rule}; give another"


def _sets(sets: list[str] | None, more: list[str] | None) -> list[str]:
    """Overrides as given: `--set a=1 --set b=2`, or `--set a=1 b=2`."""
    for text in more or []:
        if "=" not in text:
            raise UserMistake(f"{text!r}: one CONFIG is expected, and after it only KEY=VALUE; take it out")
    return [*(sets or []), *(more or [])]


def _print(lines: Sequence[str] | object) -> None:
    for line in lines:  # type: ignore[union-attr]
        print(line)


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, indent=2, allow_nan=False))


if __name__ == "__main__":
    sys.exit(main())
