"""The Alembic environment of the event log; it ships inside the wheel."""
