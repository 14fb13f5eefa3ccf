"""Files of a run by relative name, on any file system that fsspec knows; owns no state but a folder.

A file gets a fresh name and is written once: `write_new` refuses a name that is taken, makes the bytes
durable before it returns on local disks, and takes the name away again if it could not. On object stores
durable means what the store means by a finished upload. Names are relative and never leave the folder, so a
name that comes out of a log cannot reach anything else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem


def digest_of(data: bytes | memoryview) -> str:
    """xxh3-128 as hex: fast, finds damage, not cryptographic."""
    return xxhash.xxh3_128_hexdigest(data)


class Files:
    """A folder on a file system. `url`: a local path or any fsspec URL (`s3://bucket/run`, `memory://run`)."""

    def __init__(self, url: str | os.PathLike[str], **storage_options: Any) -> None:
        self.url = os.fspath(url)
        self.fs, root = fsspec.core.url_to_fs(self.url, **storage_options)
        self.root = root.rstrip("/")
        # A subclass may do anything in open(); only the plain one is bypassed for exclusive, synced files.
        self.is_local = type(self.fs) is LocalFileSystem

    def path(self, name: str) -> str:
        """The name as the file system takes it. Raises ValueError for a name that would leave the folder."""
        parts = name.split("/")
        if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is no relative file name")
        return f"{self.root}/{name}"

    def local_path(self, name: str) -> Path | None:
        """Where the file lies on this machine's disk; None on any other file system."""
        return Path(self.path(name)) if self.is_local else None

    def write_new(
        self, name: str, parts: bytes | Sequence[bytes], *, halfway: Callable[[], None] | None = None
    ) -> int:
        """Write one new file and return its size in bytes; durable on local disks once this returns.

        `halfway` is called when half of the bytes are out. Raises FileExistsError if the name is taken, and
        OSError (a full disk, ...) with no file of that name left.
        """
        data = parts if isinstance(parts, bytes) else b"".join(parts)
        path = self.path(name)
        if self.is_local:
            self._write_local(Path(path), data, halfway)
        else:
            self._write_elsewhere(name, path, data, halfway)
        return len(data)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """The bytes from `offset`, at most `size`. Raises FileNotFoundError, OSError."""
        with self.open(name) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """The file for reading."""
        path = self.path(name)
        with open(path, "rb") if self.is_local else self.fs.open(path, "rb") as file:
            yield file

    def exists(self, name: str) -> bool:
        """Whether a file or folder of that name is there."""
        self.fs.invalidate_cache()
        return self.fs.exists(self.path(name))

    def size(self, name: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        self.fs.invalidate_cache()
        return int(self.fs.size(self.path(name)))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all in it; one that is gone already is no error."""
        path = self.path(name)
        with suppress(FileNotFoundError):
            if not self.is_local:
                self.fs.invalidate_cache()
                self.fs.rm(path, recursive=True)
            elif os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def names(self, folder: str = "") -> list[str]:
        """Every file below `folder`, at any depth, as names relative to this folder; sorted."""
        self.fs.invalidate_cache()
        base = self.path(folder) if folder else self.root
        found = [path for path in self.fs.find(base) if path.startswith(f"{self.root}/")]
        return sorted(path.removeprefix(f"{self.root}/") for path in found)

    def folders(self, folder: str = "") -> list[str]:
        """The folders directly in `folder`, empty ones included, as names relative to this folder; sorted."""
        self.fs.invalidate_cache()
        base = self.path(folder) if folder else self.root
        try:
            entries = self.fs.ls(base, detail=True)
        except FileNotFoundError:
            return []
        found = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        return sorted(path.removeprefix(f"{self.root}/") for path in found)

    def make_folder(self, name: str) -> None:
        """Make a folder and those above it, durable on local disks; one that is there is no error."""
        path = self.path(name)
        if self.is_local:
            _make_folder_durable(Path(path))
        else:
            self.fs.makedirs(path, exist_ok=True)

    def sync(self, name: str) -> None:
        """Make durable what others wrote: a file, or a folder with all in it. Local disks only."""
        if not self.is_local:
            return
        path = Path(self.path(name))
        for folder, _, files in os.walk(path):
            for file in files:
                _sync(Path(folder, file))
            _sync(Path(folder))
        if path.is_file():
            _sync(path)
        _sync(path.parent)

    def _write_local(self, path: Path, data: bytes, halfway: Callable[[], None] | None) -> None:
        _make_folder_durable(path.parent)
        # O_EXCL: of two writers of one name, one gets it and the other an error, never a mixture.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                view = memoryview(data)
                half = len(data) // 2
                _write_all(descriptor, view[:half])
                if halfway is not None:
                    halfway()
                _write_all(descriptor, view[half:])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync(path.parent)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(path)
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, error.strerror, str(path)) from error  # which file, for people
            raise

    def _write_elsewhere(self, name: str, path: str, data: bytes, halfway: Callable[[], None] | None) -> None:
        # Not a lock, and none is needed: names carry the incarnation, so nobody else makes this one.
        if self.exists(name):
            raise FileExistsError(f"{self.url}: {name} is there already")
        parent = path.rpartition("/")[0]
        self.fs.makedirs(parent, exist_ok=True)
        try:
            with self.fs.open(path, "wb") as file:
                half = len(data) // 2
                file.write(data[:half])
                if halfway is not None:
                    halfway()
                file.write(data[half:])
        except BaseException:
            # Closing a file that failed may upload what it held, so the name is taken away afterwards.
            with suppress(Exception):
                self.fs.rm(path)
            raise


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _make_folder_durable(path: Path) -> None:
    """Make a folder and sync each folder that got a new entry, so that the files in it are found again."""
    if path.is_dir():
        return
    _make_folder_durable(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
