"""Group files: written once, whole or not at all, and read back as they were or refused."""

import errno
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.rollout.files import Files
from surefoot.rollout.protocols import Group, GroupStore, Sample, StoredFile
from surefoot.rollout.store import FsspecGroupStore
from surefoot.statemachine.errors import GroupUnusable

from .groups import SmallDisk, a_group, a_sample


@pytest.fixture(params=["local", "file-url", "memory", "smalldisk"])
def url(request, tmp_path) -> str:
    return {
        "local": str(tmp_path / "run"),
        "file-url": f"file://{tmp_path}/run",
        "memory": f"memory://{uuid.uuid4().hex}/run",
        "smalldisk": f"smalldisk://{tmp_path}/run",
    }[request.param]


def test_groups_are_read_back_as_they_were_written(url):
    store: GroupStore = FsspecGroupStore(url)
    groups = [a_group(5), a_group(3, samples=[a_sample(text="é" * 100), a_sample()]), a_group(9, attempt=2)]
    places = store.write("i1-000001.groups", groups)
    assert [store.read(place) for place in places] == groups


def test_places_tile_the_file_and_each_part_is_a_group_in_plain_msgpack(tmp_path):
    store = FsspecGroupStore(str(tmp_path))
    places = store.write("a", [a_group(0), a_group(1)])
    data = (tmp_path / "groups" / "a").read_bytes()
    assert places[0].offset == 0
    assert places[1].offset == places[0].size
    assert places[1].offset + places[1].size == len(data)
    second = msgspec.msgpack.decode(data[places[1].offset :])
    assert second["prompt_index"] == 1
    assert second["samples"][0]["ids"] == b"\x07\0\0\0"


def test_a_name_is_never_written_twice(url):
    store = FsspecGroupStore(url)
    (place,) = store.write("a", [a_group(1)])
    with pytest.raises(FileExistsError):
        store.write("a", [a_group(2)])
    assert store.read(place) == a_group(1)


def test_names_lists_every_file_and_delete_takes_them_away_and_tolerates_the_gone(url):
    store = FsspecGroupStore(url)
    assert store.names() == []
    store.write("b", [a_group()])
    store.write("a", [a_group()])
    assert store.names() == ["a", "b"]
    store.delete(["a", "never-was"])
    assert store.names() == ["b"]
    store.delete(["a"])
    assert store.names() == ["b"]


def test_a_missing_file_is_unusable_and_named(url):
    store = FsspecGroupStore(url)
    (place,) = store.write("gone", [a_group()])
    store.delete(["gone"])
    with pytest.raises(GroupUnusable, match=r"gone .*is missing") as caught:
        store.read(place)
    assert caught.value.file == "gone"


@pytest.mark.parametrize("at", [0, 0.5, 1])
def test_one_flipped_bit_anywhere_in_a_group_makes_it_unusable_and_leaves_the_others(tmp_path, at):
    store = FsspecGroupStore(str(tmp_path))
    first, second = store.write("a", [a_group(0), a_group(1)])
    file = tmp_path / "groups" / "a"
    data = bytearray(file.read_bytes())
    data[second.offset + int(at * (second.size - 1))] ^= 1
    file.write_bytes(data)
    with pytest.raises(GroupUnusable, match="is damaged"):
        store.read(second)
    assert store.read(first) == a_group(0)


def test_a_file_cut_short_is_unusable(tmp_path):
    store = FsspecGroupStore(str(tmp_path))
    first, second = store.write("a", [a_group(0), a_group(1)])
    os.truncate(tmp_path / "groups" / "a", second.offset + 3)
    with pytest.raises(GroupUnusable, match=f"cut short: 3 of {second.size} bytes"):
        store.read(second)
    assert store.read(first) == a_group(0)


def test_bytes_with_the_right_digest_that_are_no_group_are_unusable(tmp_path):
    import xxhash

    store = FsspecGroupStore(str(tmp_path))
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "a").write_bytes(b"\x01\x02")
    place = StoredFile(file="a", offset=0, size=2, digest=xxhash.xxh3_128(b"\x01\x02").hexdigest())
    with pytest.raises(GroupUnusable, match="is not a group"):
        store.read(place)


def test_a_full_disk_raises_and_leaves_no_name_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(SmallDisk, "room_bytes", 100)
    store = FsspecGroupStore(f"smalldisk://{tmp_path}")
    with pytest.raises(OSError, match="No space left") as caught:
        store.write("a", [a_group(), a_group()])
    assert caught.value.errno == errno.ENOSPC
    assert store.names() == []
    monkeypatch.setattr(SmallDisk, "room_bytes", None)
    (place, _) = store.write("a", [a_group(), a_group()])
    assert store.read(place) == a_group()


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_local_disk_raises_and_leaves_no_name_behind(tmp_path, monkeypatch, failing):
    store = FsspecGroupStore(str(tmp_path))
    store.write("before", [a_group()])

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space left"):
            store.write("a", [a_group()])
    assert store.names() == ["before"]
    assert list((tmp_path / "groups").iterdir()) == [tmp_path / "groups" / "before"]


def test_a_local_file_is_synced_and_its_folder_after_it(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    FsspecGroupStore(str(tmp_path / "run")).write("a", [a_group()])
    groups = tmp_path / "run" / "groups"
    assert synced[-2:] == [str(groups / "a"), str(groups)]
    # and the new folders' own entries, from the top
    assert synced[:-2] == [str(tmp_path), str(tmp_path / "run")]


@pytest.mark.parametrize("kind", ["local", "smalldisk"])
def test_killed_half_way_leaves_half_a_file_that_is_swept_and_never_read_as_whole(tmp_path, kind):
    url = f"smalldisk://{tmp_path}" if kind == "smalldisk" else str(tmp_path)
    code = (
        "import sys; from tests.rollout.groups import a_group\n"
        "from surefoot.rollout.store import FsspecGroupStore\n"
        "FsspecGroupStore(sys.argv[1]).write('a', [a_group(0), a_group(1)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, url],
        env={
            **os.environ,
            "SUREFOOT_CRASHPOINT": "group.write.inside",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])),
        },
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    store = FsspecGroupStore(url)
    assert store.names() == ["a"]
    whole = FsspecGroupStore(str(tmp_path / "whole")).write("a", [a_group(0), a_group(1)])
    assert (tmp_path / "groups" / "a").stat().st_size < sum(place.size for place in whole)
    with pytest.raises(GroupUnusable):
        store.read(whole[1])
    store.delete(store.names())
    assert store.names() == []


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b", "a/"])
def test_a_name_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match="no relative file name"):
        Files(str(tmp_path)).delete(name)


def test_two_writers_of_one_local_name_get_one_file_between_them(tmp_path):
    one, two = FsspecGroupStore(str(tmp_path)), FsspecGroupStore(str(tmp_path))
    files = Files(str(tmp_path))
    assert not files.exists("groups/a")
    one.write("a", [a_group(1)])
    with pytest.raises(FileExistsError):
        two.write("a", [a_group(1)])


def test_files_delete_takes_a_whole_folder_and_lists_folders(url):
    files = Files(url)
    files.write_new("checkpoints/u1/model/part-0", b"abc")
    files.write_new("checkpoints/u1/manifest.json", [b"{", b"}"])
    files.write_new("checkpoints/u2/manifest.json", b"{}")
    files.write_new("other", b"")
    assert files.folders("checkpoints") == ["checkpoints/u1", "checkpoints/u2"]
    assert files.read("checkpoints/u1/manifest.json") == b"{}"
    assert files.size("checkpoints/u1/model/part-0") == 3
    assert files.read("checkpoints/u1/model/part-0", 1, 1) == b"b"
    files.delete("checkpoints/u1")
    files.delete("checkpoints/u1")
    assert files.names() == ["checkpoints/u2/manifest.json", "other"]
    assert not files.exists("checkpoints/u1")
    assert files.exists("checkpoints/u2")
    assert files.folders("nowhere") == []


samples = st.builds(
    Sample,
    ids=st.binary(max_size=64),
    logprobs=st.binary(max_size=64),
    versions=st.binary(max_size=64),
    truncated=st.booleans(),
    text=st.text(max_size=20),
    reward=st.floats(allow_nan=False),
    parts=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
)
any_groups = st.lists(
    st.builds(
        Group,
        prompt_index=st.integers(0, 2**40),
        attempt=st.integers(1, 9),
        row_index=st.integers(0, 2**40),
        prompt_ids=st.binary(max_size=64),
        temperature=st.floats(0, 2),
        samples=st.lists(samples, max_size=4),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(groups=any_groups)
def test_any_groups_survive_the_store(groups):
    store = FsspecGroupStore(f"memory://{uuid.uuid4().hex}")
    assert [store.read(place) for place in store.write("a", groups)] == groups
