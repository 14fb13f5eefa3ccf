"""The group store: finished groups as files, several in one; owns the folder that they lie in.

Every file is written once, under a fresh name, and is whole and durable before an event names it; what is
read back is checked against the digest that the event holds, so a group is the one that was stored or none.
A file is a plain sequence of msgpack maps: `offset` and `size` of each are in the event.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import msgspec

from ..statemachine.crashpoints import crashpoint
from ..statemachine.errors import GroupUnusable
from .files import Files, digest_of
from .protocols import Group, StoredFile

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Group)


class FsspecGroupStore:
    """A `GroupStore` in `folder` below any fsspec URL. Holds no open file; safe to use from any thread."""

    def __init__(self, url: str | os.PathLike[str], folder: str = "groups") -> None:
        self._files = Files(url)
        self._folder = folder

    def write(self, name: str, groups: Sequence[Group]) -> list[StoredFile]:
        """Write one new file of these groups, in this order, durable when this returns.

        Raises FileExistsError if the name is taken, ValueError for no groups, and OSError (a full disk) with
        no file of that name left behind.
        """
        if not groups:
            raise ValueError(f"{name}: a group file holds at least one group")
        blobs = [_encoder.encode(group) for group in groups]
        places: list[StoredFile] = []
        offset = 0
        for blob in blobs:
            places.append(StoredFile(file=name, offset=offset, size=len(blob), digest=digest_of(blob)))
            offset += len(blob)
        self._files.write_new(self._path(name), blobs, halfway=partial(crashpoint, "group.write.inside"))
        return places

    def read(self, place: StoredFile) -> Group:
        """One group, digest checked. Raises GroupUnusable, which says what is wrong with the file."""
        try:
            blob = self._files.read(self._path(place.file), place.offset, place.size)
        except FileNotFoundError as error:
            raise self._unusable(place, "is missing") from error
        except OSError as error:
            raise self._unusable(place, f"cannot be read: {error}") from error
        if len(blob) != place.size:
            raise self._unusable(place, f"is cut short: {len(blob)} of {place.size} bytes")
        if (found := digest_of(blob)) != place.digest:
            raise self._unusable(place, f"is damaged: digest {found} where the log has {place.digest}")
        try:
            return _decoder.decode(blob)
        except msgspec.DecodeError as error:
            raise self._unusable(place, f"is not a group that this version can read: {error}") from error

    def delete(self, names: Sequence[str]) -> None:
        """Delete files; those that are gone already are no error."""
        for name in names:
            self._files.delete(self._path(name))

    def names(self) -> list[str]:
        """Every file there is, those that no event names included; sorted."""
        return [path.removeprefix(f"{self._folder}/") for path in self._files.names(self._folder)]

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _unusable(self, place: StoredFile, what: str) -> GroupUnusable:
        where = f"{place.file} at byte {place.offset}"
        return GroupUnusable(f"group file {where} {what}", file=place.file, prompt_index=None)
