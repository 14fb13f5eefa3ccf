"""Rows and their hash chain, and the rules of appending, without a database."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.statemachine.errors import LogBroken
from surefoot.statemachine.events import OptimizerStep, UpdateApplied, number
from surefoot.statemachine.log import (
    GENESIS_HASH,
    EventRow,
    build_rows,
    chained,
    row_hash,
    row_hasher,
    verify_chain,
)

from .logs import FIRST, note

TIME = "2026-01-02T03:04:05.678Z"


def some_rows(count: int = 5) -> list[EventRow]:
    return build_rows("a", 0, GENESIS_HASH, 1, [FIRST, *(note(str(n)) for n in range(count - 1))], TIME)


# the hash


def test_the_hash_is_sha256_of_one_line_of_lengths_and_numbers_and_then_the_fields() -> None:
    """Worked by hand: whoever has the file can check the chain with any tool."""
    payload = '{"a":"é","b":1}'
    text = "64 3 8 24 16 7 1 2\n" + "0" * 64 + "run" + "GroupsUp" + TIME + payload
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert row_hash("0" * 64, "run", 7, "GroupsUp", 1, payload.encode(), TIME, 2) == expected


fields = st.tuples(
    st.text(alphabet="0a \n", max_size=4),  # the hash before
    st.text(alphabet="0a \n", max_size=4),  # run
    st.integers(1, 12),  # seq
    st.text(alphabet="0a \n", max_size=4),  # type
    st.integers(1, 12),  # schema
    st.binary(max_size=4),  # payload
    st.text(alphabet="0a \n", max_size=4),  # time
    st.integers(1, 12),  # incarnation
)


@given(fields, fields)
def test_no_two_rows_have_the_same_hash(one: tuple[object, ...], two: tuple[object, ...]) -> None:
    assert (row_hash(*one) == row_hash(*two)) == (one == two)  # type: ignore[arg-type]


few = st.sampled_from(["", "a", "ab"])  # few values, so that rows share some of them and not others
alike = st.tuples(
    few, few, st.integers(1, 2), few, st.integers(0, 2), st.binary(max_size=2), few, st.integers(0, 2)
)


@given(st.lists(alike, max_size=8))
def test_the_hasher_of_many_rows_says_the_same_of_each_as_row_hash(many: list[tuple[object, ...]]) -> None:
    hash_of = row_hasher()
    for previous_hash, *columns in many:
        row = EventRow(*columns, hash="")  # type: ignore[arg-type]
        assert hash_of(previous_hash, row) == row_hash(previous_hash, *columns)  # type: ignore[arg-type]


@given(
    st.text(alphabet="abé ", min_size=3, max_size=12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 9),
)
def test_what_moves_from_one_field_to_the_next_changes_the_hash(
    text: str, first: int, second: int, moved: int
) -> None:
    """The bytes end to end are the same; only where one field ends and the next begins differs."""

    def cut(at: int, then: int) -> tuple[str, str, str]:
        at, then = sorted((min(at, len(text)), min(then, len(text))))
        return text[:at], text[at:then], text[then:]

    def hashed(parts: tuple[str, str, str]) -> str:
        run_id, kind, payload = parts
        return row_hash(GENESIS_HASH, run_id, 1, kind, 1, payload.encode(), "", 1)

    one, two = cut(first, second), cut(first + moved, second)
    assert (hashed(one) == hashed(two)) == (one == two)


# rows


def test_rows_are_numbered_on_from_the_head_and_chained() -> None:
    rows = build_rows("a", 41, "f" * 64, 3, [note("one"), note("two")], TIME)
    assert [(row.seq, row.incarnation, row.time) for row in rows] == [(42, 3, TIME), (43, 3, TIME)]
    previous = "f" * 64
    for row in rows:
        assert row.hash == row_hash(previous, "a", row.seq, row.type, 1, row.payload, TIME, 3)
        previous = row.hash


def test_a_row_gives_back_its_event_with_the_numbers_that_json_cannot_hold() -> None:
    step = OptimizerStep(
        optimizer_step=3,
        learning_rate=1e-6 / 3,
        loss=number(float("nan")),
        grad_norm=number(float("inf")),
        tokens=0,
        applied=False,
        skipped_because="not_finite",
    )
    event = UpdateApplied(
        update=4,
        learner_try=1,
        policy_version=3,
        groups=[(8, 1), (9, 2)],
        steps=[step],
        staleness_max=1,
        staleness_mean=0.5,
        staleness_max_updates=1,
        metrics={"reward/mean": 0.1 + 0.2},
        seconds={"step": 0.25},
    )
    row = build_rows("a", 0, GENESIS_HASH, 1, [event], TIME)[0]
    assert row.event() == event
    assert b'"loss":"nan"' in row.payload
    assert b'"grad_norm":"inf"' in row.payload
    over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=EventRow)
    assert over_the_wire == row


def test_the_same_event_has_the_same_payload_whatever_the_order_of_its_keys() -> None:
    one = msgspec.structs.replace(FIRST, config={"b": 1, "a": {"d": 1, "c": 2}})
    two = msgspec.structs.replace(FIRST, config={"a": {"c": 2, "d": 1}, "b": 1})
    rows = [build_rows("a", 0, GENESIS_HASH, 1, [event], TIME)[0] for event in (one, two)]
    assert rows[0] == rows[1]
    assert b'"config":{"a":{"c":2,"d":1},"b":1}' in rows[0].payload


@pytest.mark.parametrize(("kind", "schema"), [("GroupsTeleported", 1), ("LearnerLost", 2)])
def test_a_type_or_version_that_is_not_known_may_be_read_but_has_no_event(kind: str, schema: int) -> None:
    row = msgspec.structs.replace(some_rows()[2], type=kind, schema=schema)
    with pytest.raises(LogBroken, match=f"event 3 is a {kind} of schema {schema}"):
        row.event()


# the chain


def test_a_whole_chain_passes_and_gives_its_last_hash() -> None:
    rows = some_rows()
    assert verify_chain(rows) == rows[-1].hash
    assert list(chained(rows)) == rows
    assert verify_chain([]) == GENESIS_HASH


@given(st.data())
def test_any_field_of_any_row_changed_is_found_by_its_seq(data: st.DataObject) -> None:
    rows = some_rows()
    place = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from(["run_id", "type", "schema", "payload", "time", "incarnation", "hash"]))
    old = getattr(rows[place], field)
    kind = {str: st.text(max_size=9), int: st.integers(0, 99), bytes: st.binary(max_size=9)}[type(old)]
    rows[place] = msgspec.structs.replace(
        rows[place], **{field: data.draw(kind.filter(lambda new: new != old))}
    )
    with pytest.raises(LogBroken) as broken:
        verify_chain(rows)
    assert broken.value.facts["seq"] == place + 1


@pytest.mark.parametrize("place", range(4))
def test_a_row_taken_out_put_twice_or_swapped_is_found(place: int) -> None:
    rows = some_rows()
    spoilt = {
        "out": rows[:place] + rows[place + 1 :],
        "twice": [*rows[: place + 1], *rows[place:]],
        "swapped": [*rows[:place], rows[place + 1], rows[place], *rows[place + 2 :]],
    }
    expected = {"out": place + 1, "twice": place + 2, "swapped": place + 1}
    for name, those in spoilt.items():
        with pytest.raises(LogBroken) as broken:
            verify_chain(those)
        assert broken.value.facts["seq"] == expected[name], name


def test_a_chain_can_be_taken_up_in_the_middle() -> None:
    rows = some_rows(8)
    for before, row in pairwise(rows):
        assert verify_chain(rows[before.seq :], before.hash, before.seq) == rows[-1].hash
        assert verify_chain(rows[before.seq :], before.hash) == rows[-1].hash
        with pytest.raises(LogBroken) as broken:
            verify_chain(rows[before.seq :], row.hash)
        assert broken.value.facts["seq"] == row.seq
    with pytest.raises(LogBroken):
        verify_chain(rows[3:])


def test_rows_before_a_broken_one_pass_first() -> None:
    rows = some_rows()
    rows[3] = msgspec.structs.replace(rows[3], time="another")
    passed: list[int] = []
    with pytest.raises(LogBroken):
        passed.extend(row.seq for row in chained(rows))
    assert passed == [1, 2, 3]
