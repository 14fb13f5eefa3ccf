"""Alembic's entry: runs the migrations on the connection that the log hands over, in its transaction.

Owns nothing: the lock that keeps two migrations apart, and the commit, are the caller's.
"""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
if "connection" not in attributes:
    raise RuntimeError("migrations are run by starting or resuming a run, not by the alembic command")

context.configure(
    connection=attributes["connection"],
    target_metadata=attributes["metadata"],
    version_table=attributes["version_table"],
    transactional_ddl=True,
    render_as_batch=False,  # a batch rebuild would drop the triggers of `events`
)
with context.begin_transaction():
    context.run_migrations()
