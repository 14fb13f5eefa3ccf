"""A log for tests to write event by event, and then to spoil: its rows are made, and chained, last.

A checkpoint whose `head_seq` is 0 is completed when rows are made: it names the row before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import msgspec

from surefoot.statemachine.events import CheckpointCommitted, Event, type_of
from surefoot.statemachine.log import GENESIS_HASH, EventRow, build_rows

RUN_ID = "scenario"


class SpoilableLog:
    """Events with the incarnation that wrote each; `incarnation` is the one that writes now."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Event]] = []
        self.incarnation = 0

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.entries]

    def add(self, *events: Event) -> Self:
        """Write events as they are, in the current incarnation."""
        self.entries += [(max(1, self.incarnation), event) for event in events]
        return self

    def rows(self) -> list[EventRow]:
        """The whole log, its chain made last."""
        rows: list[EventRow] = []
        for incarnation, event in self.entries:
            seq, digest = (rows[-1].seq, rows[-1].hash) if rows else (0, GENESIS_HASH)
            if isinstance(event, CheckpointCommitted) and event.head_seq == 0:
                event = msgspec.structs.replace(event, head_seq=seq, head_hash=digest)
            rows += build_rows(RUN_ID, seq, digest, incarnation, [event], "2026-01-01T00:00:00Z")
        return rows

    def seq(self, kind: type[Event], nth: int = 0) -> int:
        """The seq of the nth event of a kind; negative from the end."""
        return [seq for seq, event in enumerate(self.events, 1) if isinstance(event, kind)][nth]

    def event(self, kind: type[Event], nth: int = 0) -> Any:
        return self.events[self.seq(kind, nth) - 1]

    def change(self, kind: type[Event], nth: int = 0, **changes: Any) -> Self:
        """Spoil one event: a value, or a function of the old value."""
        place = self.seq(kind, nth) - 1
        incarnation, event = self.entries[place]
        values = {
            name: value(getattr(event, name)) if isinstance(value, Callable) else value
            for name, value in changes.items()
        }
        self.entries[place] = (incarnation, msgspec.structs.replace(event, **values))
        return self

    def remove(self, kind: type[Event], nth: int = 0) -> Self:
        del self.entries[self.seq(kind, nth) - 1]
        return self

    def insert_before(self, kind: type[Event], nth: int, *events: Event) -> Self:
        place = self.seq(kind, nth) - 1
        self.entries[place:place] = [(self.entries[place][0], event) for event in events]
        return self

    def insert_after(self, kind: type[Event], nth: int, *events: Event) -> Self:
        place = self.seq(kind, nth)
        self.entries[place:place] = [(self.entries[place - 1][0], event) for event in events]
        return self

    def kinds(self) -> list[str]:
        return [type_of(event) for event in self.events]
