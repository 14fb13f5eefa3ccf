"""Checkpoint folders: their names, their manifests, and whether what lies there is what was written.

Without torch. Owns the folder `checkpoints` of a run's storage. Invariants: a folder is written once, under a
fresh name; its manifest, written last, names every other file with size and digest; a checkpoint is loaded
only if its manifest is the one that its event committed and every file is as the manifest says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import msgspec
import xxhash

from ..rollout.files import Files
from ..rollout.payload import digest_of_payload
from ..rollout.protocols import Published
from ..statemachine.errors import CheckpointUnusable
from ..statemachine.events import CheckpointCommitted

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
SERVED = "served.safetensors"
_CHUNK_BYTES = 1 << 24


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint, by its name in the folder."""

    name: str
    size: int  # bytes
    digest: str  # xxh3-128


class ServedVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The publication that `served.safetensors` holds."""

    version: int
    update: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is."""

    form: int = 1
    update: int
    optimizer_steps: int
    head_seq: int  # the log's head when the snapshot was taken
    head_hash: str
    weights_digest: str
    ranks: int  # that wrote it; any number may load it
    served: ServedVersion | None
    files: list[ManifestFile]


class SnapshotBegun(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint under way is of: a rank's answer, here because the driver does not load torch."""

    update: int
    optimizer_steps: int
    weights_digest: str


class Checkpoints:
    """The checkpoints of one run. `url`: the run's storage, a local path or an fsspec URL."""

    def __init__(self, url: str | os.PathLike[str], folder: str = FOLDER) -> None:
        self._files = Files(url)
        self._folder = folder

    def names(self) -> list[str]:
        """Every checkpoint folder there is, committed or not."""
        return [path.removeprefix(f"{self._folder}/") for path in self._files.folders(self._folder)]

    def exists(self, path: str) -> bool:
        """Whether a folder of that name is there."""
        return self._files.exists(self._name(path))

    def delete(self, path: str) -> None:
        """Delete one; gone already is no error."""
        self._files.delete(self._name(path))

    def make_folder(self, path: str) -> None:
        """Make a new folder. Raises FileExistsError: a checkpoint is never written over."""
        if self.exists(path):
            raise FileExistsError(f"{self._files.url}: checkpoint {path} is there already")
        self._files.make_folder(self._name(path))

    def location(self, path: str) -> tuple[str, bool]:
        """Where DCP finds the folder, and whether that is a local path rather than a URL."""
        local = self._files.local_path(self._name(path))
        if local is not None:
            return str(local), True
        return self._files.fs.unstrip_protocol(self._files.path(self._name(path))), False

    def describe(self, path: str, prefix: str) -> list[ManifestFile]:
        """Sizes and digests of the files whose names begin with `prefix`."""
        folder = self._name(path)
        names = [name.removeprefix(f"{folder}/") for name in self._files.names(folder)]
        return [self._describe(path, name) for name in names if name.startswith(prefix)]

    def add_served(self, path: str, served: Published) -> tuple[ServedVersion, ManifestFile]:
        """Keep the weights of the last publication in the checkpoint."""
        self._files.write_new(self._name(path, SERVED), served.payload)
        version = ServedVersion(version=served.version, update=served.update, digest=served.digest)
        return version, self._describe(path, SERVED)

    def add_manifest(self, path: str, manifest: Manifest) -> tuple[str, int]:
        """Write the manifest, and make the folder durable; its digest, and the checkpoint's bytes."""
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        self._files.sync(self._name(path))
        self._files.write_new(self._name(path, MANIFEST), data)
        size = len(data) + sum(file.size for file in manifest.files)
        return hashlib.sha256(data).hexdigest(), size

    def manifest(self, committed: CheckpointCommitted) -> Manifest:
        """The manifest that the event committed. Raises CheckpointUnusable."""
        path = committed.path
        data = self._read(path, MANIFEST)
        if (found := hashlib.sha256(data).hexdigest()) != committed.manifest_digest:
            raise _unusable(
                path, MANIFEST, f"has digest {found}, the log committed {committed.manifest_digest}"
            )
        try:
            return msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:  # of a version that this one does not know
            raise _unusable(path, MANIFEST, f"cannot be read: {error}") from error

    def head_seq(self, path: str) -> int | None:
        """The log's last event as a checkpoint, named by it or not, was taken; None if it is not whole."""
        try:
            return msgspec.json.decode(self._read(path, MANIFEST), type=Manifest).head_seq
        except (CheckpointUnusable, msgspec.DecodeError):
            return None

    def verify(self, path: str, files: Sequence[ManifestFile]) -> None:
        """Compare files with what the manifest says of them. Raises CheckpointUnusable, naming one."""
        for file in files:
            try:
                found = self._describe(path, file.name)
            except FileNotFoundError as error:
                raise _unusable(path, file.name, "is missing") from error
            except (OSError, ValueError) as error:
                raise _unusable(path, file.name, f"cannot be read: {error}") from error
            if found.size != file.size:
                raise _unusable(path, file.name, f"has {found.size} bytes where {file.size} were written")
            if found.digest != file.digest:
                raise _unusable(path, file.name, f"has digest {found.digest} where {file.digest} was written")

    def served(self, committed: CheckpointCommitted) -> Published | None:
        """The published weights that the checkpoint keeps. Raises CheckpointUnusable."""
        manifest = self.manifest(committed)
        if (served := manifest.served) is None:
            return None
        payload = self._read(committed.path, SERVED)
        try:
            digest = digest_of_payload(payload)
        except ValueError as error:
            raise _unusable(committed.path, SERVED, f"cannot be read: {error}") from error
        if digest != served.digest:
            raise _unusable(committed.path, SERVED, f"has weights {digest}, not {served.digest}")
        return Published(version=served.version, update=served.update, digest=digest, payload=payload)

    def _name(self, path: str, file: str = "") -> str:
        return f"{self._folder}/{path}/{file}" if file else f"{self._folder}/{path}"

    def _read(self, path: str, name: str) -> bytes:
        try:
            return self._files.read(self._name(path, name))
        except FileNotFoundError as error:
            raise _unusable(path, name, "is missing") from error
        except OSError as error:
            raise _unusable(path, name, f"cannot be read: {error}") from error

    def _describe(self, path: str, name: str) -> ManifestFile:
        hashed, size = xxhash.xxh3_128(), 0
        with self._files.open(self._name(path, name)) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hashed.update(chunk)
                size += len(chunk)
        return ManifestFile(name=name, size=size, digest=hashed.hexdigest())


def _unusable(path: str, name: str, what: str) -> CheckpointUnusable:
    return CheckpointUnusable(f"checkpoint {path}: {name} {what}", path=path, file=name)
