"""The tables of runs and events, and the triggers that keep events as they were written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SQLITE_TRIGGERS = (
    """
    CREATE TRIGGER events_refuse_update BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are only appended, never changed'); END
    """,
    """
    CREATE TRIGGER events_refuse_delete BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are only appended, never deleted'); END
    """,
    # INSERT OR REPLACE deletes the row in its way without asking the trigger above
    """
    CREATE TRIGGER events_refuse_replace BEFORE INSERT ON events
    WHEN EXISTS (SELECT 1 FROM events WHERE run_id = NEW.run_id AND seq = NEW.seq)
    BEGIN SELECT RAISE(ABORT, 'events are only appended, never replaced'); END
    """,
)

_POSTGRESQL_TRIGGERS = (
    """
    CREATE FUNCTION events_refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'events are only appended, never changed or deleted (%)', TG_OP; END $$
    """,
    """
    CREATE TRIGGER events_refuse_change BEFORE UPDATE OR DELETE ON events
    FOR EACH ROW EXECUTE FUNCTION events_refuse()
    """,
    """
    CREATE TRIGGER events_refuse_truncate BEFORE TRUNCATE ON events
    FOR EACH STATEMENT EXECUTE FUNCTION events_refuse()
    """,
)


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("head_seq", sa.BigInteger, nullable=False),
        sa.Column("head_hash", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("process_start", sa.Text, nullable=False),
        sa.Column("heartbeat_at", sa.Double, nullable=False),
        sa.Column("released", sa.Boolean, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("schema", sa.Integer, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("time", sa.Text, nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
    )
    dialect = op.get_bind().dialect.name
    for statement in _SQLITE_TRIGGERS if dialect == "sqlite" else _POSTGRESQL_TRIGGERS:
        op.execute(statement)


def downgrade() -> None:
    raise NotImplementedError("a log is never taken back to an older form: keep a copy instead")
