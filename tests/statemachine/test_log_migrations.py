"""The form of the tables: how it is made, recognised, and refused when it is from the future."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from importlib import resources

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from surefoot import migrations
from surefoot.statemachine.database import open_database
from surefoot.statemachine.errors import SchemaTooNew
from surefoot.statemachine.log import verify_chain
from surefoot.statemachine.schema import READABLE_REVISIONS, SCHEMA_REVISION, VERSION_TABLE, metadata
from surefoot.statemachine.sqllog import open_log

from .logs import FIRST, HERE, append, note

SCRIPTS = ScriptDirectory(str(resources.files(migrations)))


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    """A connection to a database that a run has been begun in."""
    with closing(open_log(database_url, migrate=True)) as log:
        log.create("a", FIRST, HERE)
        append(log, "a", note("one"))
    database = open_database(database_url, writable=True)
    assert database.writer is not None
    with database.writer.connect() as connection:
        yield connection
    database.close()


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(connection: Connection) -> None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    assert context.get_current_revision() == SCHEMA_REVISION
    assert compare_metadata(context, metadata) == []


def test_the_code_knows_its_newest_migration() -> None:
    assert SCRIPTS.get_heads() == [SCHEMA_REVISION]
    assert SCHEMA_REVISION in READABLE_REVISIONS
    numbers = [script.revision for script in SCRIPTS.walk_revisions()]
    assert numbers == sorted(numbers, reverse=True)
    assert all(re.fullmatch(r"\d{4}", number) for number in numbers)


def test_no_migration_rebuilds_events() -> None:
    """A rebuild drops the triggers that keep events as they were written."""
    for script in SCRIPTS.walk_revisions():
        source = resources.files(migrations).joinpath(script.path).read_text()
        assert "batch_alter_table" not in source
        assert not re.search(r"drop_table|drop_column|alter_column|rename_table", source)


def test_an_additive_migration_leaves_the_triggers_in_force(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE events ADD COLUMN hint TEXT"))
    connection.commit()
    for statement in ("UPDATE events SET hint = 'x'", "DELETE FROM events"):
        with pytest.raises(DBAPIError, match="events are only appended"):
            connection.execute(text(statement))
        connection.rollback()


def test_a_second_start_migrates_nothing(database_url: str, connection: Connection) -> None:
    connection.rollback()
    with closing(open_log(database_url, migrate=True)) as log:
        assert len(list(log.read("a"))) == 3
        verify_chain(log.read("a"))


@pytest.mark.parametrize("revision", ["0002", "9999", "abcdef123456"])
@pytest.mark.parametrize("migrate", [True, False])
def test_a_database_newer_than_the_code_is_refused_with_the_command_that_helps(
    database_url: str, connection: Connection, revision: str, migrate: bool
) -> None:
    connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))
    connection.commit()
    with pytest.raises(SchemaTooNew, match=f"schema {revision}.*none after {SCHEMA_REVISION}.*`pip install"):
        open_log(database_url, migrate=migrate)
    assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == revision
