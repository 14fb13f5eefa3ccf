"""Brings a database's tables to the form that this version writes, and says which form they have.

Owns nothing but the lock that keeps two migrations of one process apart. The invariant: two processes that
open one new database at the same instant migrate it once, and reading migrates nothing.
"""

from __future__ import annotations

import threading

from sqlalchemy import Connection, Engine, inspect

from .crashpoints import crashpoint
from .errors import RunUnknown, SchemaTooNew, UserMistake
from .schema import READABLE_REVISIONS, SCHEMA_REVISION, VERSION_TABLE, metadata

_ADVISORY_LOCK = 0x5375726566  # any number that is ours

# Alembic's `context` and `op` are global to the process
_one_at_a_time = threading.Lock()


def require_readable(engine: Engine, name: str) -> None:
    """Raise RunUnknown where no log has been made yet, SchemaTooNew for one that is from the future."""
    with engine.connect() as connection:
        revision = _revision(connection)
    if revision is None:
        raise RunUnknown(f"there is no log at {name} yet: `surefoot train` begins one")
    if not _is_current(name, revision) and revision not in READABLE_REVISIONS:
        raise UserMistake(
            f"the log at {name} has the old schema {revision}, which can no longer be read as it is: "
            "`surefoot train` brings it up to date"
        )


def migrate(engine: Engine, name: str) -> None:
    """Bring the tables up to date. Raises SchemaTooNew and changes nothing if they are from the future."""
    with engine.connect() as connection:
        if _is_current(name, _revision(connection)):
            return
    with _one_at_a_time:
        crashpoint("migrate.before")
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
            # another process may have been faster; in SQLite the transaction itself is the lock
            if not _is_current(name, _revision(connection)):
                _upgrade(connection, name)
        crashpoint("migrate.after")


def _upgrade(connection: Connection, name: str) -> None:
    from alembic import command
    from alembic.config import Config

    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE not in tables and tables & {"runs", "events"}:
        raise UserMistake(
            f"{name} has tables named runs or events that are not Surefoot's: give it a database of its own"
        )
    root = __name__.partition(".")[0]
    config = Config()
    config.set_main_option("script_location", f"{root}.migrations:")
    config.attributes.update(connection=connection, metadata=metadata, version_table=VERSION_TABLE)
    command.upgrade(config, SCHEMA_REVISION)


def _is_current(name: str, revision: str | None) -> bool:
    if revision is not None and not (revision.isdigit() and int(revision) <= int(SCHEMA_REVISION)):
        raise SchemaTooNew(
            f"the log at {name} has schema {revision}, and this Surefoot knows none after {SCHEMA_REVISION}: "
            "`pip install --upgrade surefoot`",
            revision=revision,
            known=SCHEMA_REVISION,
        )
    return revision == SCHEMA_REVISION


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar_one_or_none()
