"""What a state is made of: the records that the fold keeps, the fates of groups, and how it says no.

Owns nothing; the records live in `RunState`. Invariant: a refusal names the seq, the event and the rule.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from .errors import IllegalEvent
from .events import StoredGroup, UpdateApplied
from .log import EventRow

ADMITTED, STORED, TRAINED, DROPPED = 1, 2, 3, 4
FATES = {ADMITTED: "admitted", STORED: "stored", TRAINED: "trained", DROPPED: "dropped"}


class LiveGroup(msgspec.Struct):
    """A group that is admitted or stored, not yet trained or dropped."""

    prompt_index: int
    attempt: int
    admission_version: int
    under_way: bool = True  # an attempt is out; else one must be issued
    failures: int = 0  # attempts lost to raised work or dead workers, in this incarnation
    last_error: str = ""
    stored: StoredGroup | None = None
    file: str = ""
    stored_order: int = 0

    @property
    def oldest_version(self) -> int:
        """Version of its oldest token, or what it will be at least."""
        return min(self.stored.oldest_versions) if self.stored else self.admission_version


class UpdateRecord(msgspec.Struct, frozen=True):
    """One recorded update: its event, where its groups lie, and the execution that made it."""

    seq: int
    event: UpdateApplied
    places: tuple[tuple[str, StoredGroup], ...]  # file, group; in training order
    fingerprint: dict[str, str]


class FileUse(msgspec.Struct):
    """A group file: how many of its groups may still be trained, and the last update that used it."""

    waiting: int
    last_update: int = 0

    def leave(self, update: int) -> None:
        """One of its groups waits no more: an update has trained it, or, for 0, it never will be."""
        self.waiting -= 1
        if update > self.last_update:
            self.last_update = update


def refuse(row: EventRow, why: str) -> NoReturn:
    """The event is not legal here. To be called once that is known: most rows are as they should be, and
    `why` is not worth building for them."""
    raise IllegalEvent(f"event {row.seq}: {row.type} is not legal: {why}", seq=row.seq, event=row.type)
