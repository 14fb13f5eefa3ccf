"""Checkpoint folders without torch: written once, whole or refused, deleted whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from surefoot.rollout.payload import RawTensor, digest_of, pack
from surefoot.rollout.protocols import Published
from surefoot.statemachine.errors import CheckpointUnusable
from surefoot.statemachine.events import CheckpointCommitted
from surefoot.trainer.checkpoints import Checkpoints, Manifest

from ..rollout import groups as _groups  # makes smalldisk:// known

TENSORS = {"w": RawTensor("F32", (3,), np.arange(3, dtype="<f4").tobytes())}
SERVED = Published(version=1, update=4, digest=digest_of(TENSORS), payload=pack(TENSORS))


@pytest.fixture(params=["local", "url"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    assert _groups.SmallDisk.protocol == "smalldisk"
    return str(tmp_path / "run") if request.param == "local" else f"smalldisk://{tmp_path}/run"


def write(
    storage: str, path: str = "u000006-i0001-001", served: Published | None = SERVED
) -> CheckpointCommitted:
    """A checkpoint of two files, and the event that commits it."""
    checkpoints = Checkpoints(storage)
    checkpoints.make_folder(path)
    for name, data in (("__0_0.distcp", b"shard"), (".metadata", b"where")):
        checkpoints._files.write_new(f"checkpoints/{path}/{name}", data)
    files = checkpoints.describe(path, "")
    kept = None
    if served is not None:
        kept, file = checkpoints.add_served(path, served)
        files.append(file)
    manifest = Manifest(
        update=6,
        optimizer_steps=6,
        head_seq=40,
        head_hash="h",
        weights_digest="w",
        ranks=1,
        served=kept,
        files=files,
    )
    digest, size = checkpoints.add_manifest(path, manifest)
    return CheckpointCommitted(
        update=6,
        optimizer_steps=6,
        policy_version=1,
        path=path,
        manifest_digest=digest,
        weights_digest="w",
        bytes=size,
        head_seq=40,
        head_hash="h",
    )


def folder_of(storage: str, committed: CheckpointCommitted) -> Path:
    return Path(storage.removeprefix("smalldisk://"), "checkpoints", committed.path)


def test_the_manifest_names_every_other_file_and_the_logs_head(storage: str) -> None:
    committed = write(storage)
    manifest = Checkpoints(storage).manifest(committed)
    folder = folder_of(storage, committed)
    on_disk = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert committed.bytes == sum(on_disk.values())
    del on_disk["manifest.json"]
    assert {file.name: file.size for file in manifest.files} == on_disk
    assert set(on_disk) == {"__0_0.distcp", ".metadata", "served.safetensors"}
    assert (manifest.update, manifest.optimizer_steps) == (6, 6)
    assert (manifest.head_seq, manifest.head_hash) == (40, "h")
    Checkpoints(storage).verify(committed.path, manifest.files)


def test_a_folder_is_never_written_over(storage: str) -> None:
    committed = write(storage)
    with pytest.raises(FileExistsError, match=committed.path):
        Checkpoints(storage).make_folder(committed.path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "served.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "changed"])
def test_damage_is_found_and_the_file_named(storage: str, name: str, damage: str) -> None:
    committed = write(storage)
    path = folder_of(storage, committed) / name
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    checkpoints = Checkpoints(storage)
    with pytest.raises(CheckpointUnusable) as found:
        checkpoints.verify(committed.path, checkpoints.manifest(committed).files)
    assert committed.path in str(found.value) and name in str(found.value)


@pytest.mark.parametrize("damage", ["missing", "cut short", "another's"])
def test_only_the_committed_manifest_counts(storage: str, damage: str) -> None:
    """A half-written checkpoint has none; one that was edited is another."""
    committed = write(storage)
    path = folder_of(storage, committed) / "manifest.json"
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_bytes(path.read_bytes().replace(b'"update": 6', b'"update": 7'))
    with pytest.raises(CheckpointUnusable, match=r"manifest\.json"):
        Checkpoints(storage).manifest(committed)


def test_a_checkpoint_that_was_deleted_by_hand_is_said_to_be_missing(storage: str) -> None:
    committed = write(storage)
    Checkpoints(storage).delete(committed.path)
    with pytest.raises(CheckpointUnusable, match="is missing"):
        Checkpoints(storage).manifest(committed)


def test_the_served_weights_come_back_with_their_version(storage: str) -> None:
    assert Checkpoints(storage).served(write(storage)) == SERVED
    assert Checkpoints(storage).served(write(storage, "u6-2", served=None)) is None


@pytest.mark.parametrize("damage", ["missing", "changed", "no safetensors"])
def test_served_weights_that_are_not_those_are_refused(storage: str, damage: str) -> None:
    committed = write(storage)
    path = folder_of(storage, committed) / "served.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    else:
        path.write_bytes(b"x" * 40)
    with pytest.raises(CheckpointUnusable, match=r"served\.safetensors"):
        Checkpoints(storage).served(committed)


def test_names_are_all_folders_and_deletion_is_whole_and_repeatable(storage: str) -> None:
    checkpoints = Checkpoints(storage)
    assert checkpoints.names() == []
    committed = write(storage)
    checkpoints.make_folder("u000007-i0001-002")  # its driver died before a file was written
    assert checkpoints.names() == [committed.path, "u000007-i0001-002"]
    for path in [*checkpoints.names(), committed.path]:
        checkpoints.delete(path)
    assert checkpoints.names() == []
    assert not folder_of(storage, committed).exists()


def test_a_manifest_of_a_form_that_is_not_known_is_refused(storage: str) -> None:
    committed = write(storage)
    path = folder_of(storage, committed) / "manifest.json"
    data = path.read_bytes().replace(b'"form": 1', b'"future": 1, "form": 2')
    path.write_bytes(data)
    import hashlib

    newer = msgspec.structs.replace(committed, manifest_digest=hashlib.sha256(data).hexdigest())
    with pytest.raises(CheckpointUnusable, match="cannot be read"):
        Checkpoints(storage).manifest(newer)
