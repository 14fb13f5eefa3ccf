"""The tables that hold runs, and the number of their form.

Owns the columns' names and types as the newest migration leaves them. The invariant: what the migrations
make of an empty database is exactly this. Triggers, which SQLAlchemy does not describe, stand in the
migrations alone.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, MetaData, Table, Text

SCHEMA_REVISION = "0001"
"""The newest migration. Numbers grow; a greater one was made by a newer version."""

READABLE_REVISIONS = frozenset({SCHEMA_REVISION})
"""Forms of the tables that this version reads without migrating them."""

VERSION_TABLE = "surefoot_schema"
"""Where Alembic keeps the number; named so that it does not meet another program's."""

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("incarnation", BigInteger, nullable=False),  # the fence
    Column("head_seq", BigInteger, nullable=False),
    Column("head_hash", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("process_start", Text, nullable=False),
    Column("heartbeat_at", Double, nullable=False),  # seconds since 1970, by the database's clock
    Column("released", Boolean, nullable=False),
)
"""One row a run: where its log ends, and who drives it. The row that every append locks first."""

events = Table(
    "events",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("type", Text, nullable=False),
    Column("schema", Integer, nullable=False),
    Column("payload", Text, nullable=False),
    Column("time", Text, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("hash", Text, nullable=False),
)
"""The log itself. Only ever appended to."""
