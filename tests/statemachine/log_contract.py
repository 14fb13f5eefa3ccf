"""What every log must do, whatever holds its rows. Each kind of log runs all of these."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from surefoot.statemachine.errors import (
    FencedOut,
    LogBroken,
    RunClosed,
    RunExists,
    RunInUse,
    RunUnknown,
    SurefootError,
    WrongSeq,
)
from surefoot.statemachine.events import IncarnationBegan, RunCompleted, RunFailed, RunStopped, TakeReason
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import GENESIS_HASH, EventLog, follow, verify_chain

from .logs import ELSEWHERE, FIRST, HERE, append, ending, note, rows_after, texts


class LogContract:
    """Kinds of logs say how one is opened, and how its clock goes on."""

    @pytest.fixture
    def log(self) -> Iterator[EventLog]:
        raise NotImplementedError

    def again(self, log: EventLog) -> EventLog:
        """What another driver sees: the same database through another connection."""
        raise NotImplementedError

    def let_pass(self, log: EventLog, run_id: str, seconds: float) -> None:
        """Move the database's clock on, as the run's heartbeat sees it."""
        raise NotImplementedError

    # creating

    def test_a_run_begins_with_its_first_event_and_incarnation_1(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        rows = list(log.read("a"))
        assert [row.event() for row in rows] == [
            FIRST,
            IncarnationBegan(incarnation=1, reason=TakeReason.NEW, host=HERE.host, pid=HERE.pid),
        ]
        assert (head.head_seq, head.incarnation, head.driver, head.released) == (2, 1, HERE, False)
        assert head.head_hash == rows[-1].hash == verify_chain(rows)

    def test_a_name_is_taken_once(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        with pytest.raises(RunExists, match="'a'"):
            self.again(log).create("a", FIRST, HERE)
        assert log.head("a").head_hash == head.head_hash

    def test_runs_are_listed_by_name_and_do_not_touch_each_other(self, log: EventLog) -> None:
        assert log.runs() == []
        for run_id in ("b", "a", "B", "a-2"):
            log.create(run_id, FIRST, HERE)
        append(log, "b", note("only here"))
        assert [(head.run_id, head.head_seq) for head in log.runs()] == [
            ("B", 2),
            ("a", 2),
            ("a-2", 2),
            ("b", 3),
        ]
        assert texts(list(log.read("a"))) == []

    def test_a_run_that_is_not_there_is_unknown(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        head = msgspec.structs.replace(log.head("a"), run_id="b")
        for ask in (
            lambda: log.head("b"),
            lambda: list(log.read("b")),
            lambda: log.take_over("b", HERE),
            lambda: log.heartbeat("b", 1),
            lambda: log.release("b", 1),
            lambda: log.append("b", 2, 1, rows_after(head, note())),
        ):
            with pytest.raises(RunUnknown, match="'b'"):
                ask()

    # appending and reading

    def test_rows_are_dense_from_1_and_read_back_as_they_were_built(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        built = append(log, "a", note("one")) + append(log, "a", note("two"), note("three"))
        rows = list(log.read("a"))
        assert [row.seq for row in rows] == [1, 2, 3, 4, 5]
        assert rows[2:] == built
        assert texts(rows) == ["one", "two", "three"]
        assert verify_chain(rows) == log.head("a").head_hash

    def test_any_text_reads_back_the_same(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        text = "naïve % 'quote\" \\ \x00 \n 你好 🦶 %s :name"
        append(log, "a", note(text))
        append(
            log,
            "a",
            RunFailed(code="x", error=text, updates=1, optimizer_steps=2, facts={"é": [1.5e-9, None]}),
        )
        rows = list(self.again(log).read("a"))
        assert texts(rows) == [text]
        last = rows[-1].event()
        assert isinstance(last, RunFailed)
        assert (last.error, last.facts) == (text, {"é": [1.5e-9, None]})
        verify_chain(rows)

    def test_a_part_of_the_log_can_be_read(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        append(log, "a", *(note(str(n)) for n in range(8)))
        assert [row.seq for row in log.read("a", 7)] == [8, 9, 10]
        assert [row.seq for row in log.read("a", 3, 4)] == [4, 5, 6, 7]
        assert [row.seq for row in log.read("a", 8, 100)] == [9, 10]
        assert list(log.read("a", 10)) == list(log.read("a", 0, 0)) == []

    def test_a_log_of_many_pages_is_read_whole(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        append(log, "a", *(note(str(n)) for n in range(5000)))
        rows = list(log.read("a"))
        assert [row.seq for row in rows] == list(range(1, 5003))
        assert verify_chain(rows) == log.head("a").head_hash
        assert [row.seq for row in log.read("a", 100, 3000)] == list(range(101, 3101))

    def test_a_wrong_seq_is_refused_with_both_values(self, log: EventLog) -> None:
        old = log.create("a", FIRST, HERE)
        append(log, "a", note("first"))
        with pytest.raises(WrongSeq) as refused:
            log.append("a", 2, 1, rows_after(old, note("late")))
        assert refused.value.facts == {"run": "a", "expected": 2, "found": 3}
        ahead = msgspec.structs.replace(log.head("a"), head_seq=7)
        with pytest.raises(WrongSeq) as refused:
            log.append("a", 7, 1, rows_after(ahead, note("early")))
        assert refused.value.facts == {"run": "a", "expected": 7, "found": 3}
        assert texts(list(log.read("a"))) == ["first"]

    def test_an_incarnation_that_nobody_has_begun_is_refused(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        log.append("a", 2, 1, rows := rows_after(head, note("right")))
        ahead = msgspec.structs.replace(head, head_seq=3, head_hash=rows[-1].hash, incarnation=7)
        with pytest.raises(FencedOut) as refused:
            log.append("a", 3, 7, rows_after(ahead, note("wrong")))
        assert refused.value.facts == {"run": "a", "mine": 7, "current": 1}
        assert texts(list(log.read("a"))) == ["right"]

    def test_rows_that_do_not_go_on_from_the_head_are_refused(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        astray = msgspec.structs.replace(head, head_hash=GENESIS_HASH)
        with pytest.raises(LogBroken) as broken:
            log.append("a", 2, 1, rows_after(astray, note()))
        assert broken.value.facts["seq"] == 3
        assert log.head("a").head_hash == head.head_hash

    def test_an_append_is_all_or_nothing(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        rows = rows_after(head, note("whole"), note("torn"))
        rows[1] = msgspec.structs.replace(rows[1], hash="0" * 64)
        with pytest.raises(LogBroken):
            log.append("a", 2, 1, rows)
        assert [row.seq for row in log.read("a")] == [1, 2]
        append(log, "a", note("goes on"))
        assert texts(list(log.read("a"))) == ["goes on"]

    def test_rows_of_another_place_are_refused(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        rows = rows_after(head, note())
        for run_id, seq, incarnation in (("b", 2, 1), ("a", 3, 1), ("a", 2, 2)):
            with pytest.raises(ValueError, match="cannot be event"):
                log.append(run_id, seq, incarnation, rows)
        with pytest.raises(ValueError, match="at least one"):
            log.append("a", 2, 1, [])

    # sending again

    def test_report_44_an_append_sent_again_takes_effect_once(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        rows = rows_after(head, note("once"), note("and once"))
        for _ in range(3):
            log.append("a", 2, 1, rows)
        self.again(log).append("a", 2, 1, rows)
        assert texts(list(log.read("a"))) == ["once", "and once"]
        append(log, "a", note("later"))
        log.append("a", 2, 1, rows)
        assert texts(list(log.read("a"))) == ["once", "and once", "later"]

    def test_report_44_the_same_events_built_anew_are_not_the_same_append(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        log.append("a", 2, 1, rows_after(head, note("once"), time="2026-01-01T00:00:00.000Z"))
        with pytest.raises(WrongSeq):
            log.append("a", 2, 1, rows_after(head, note("once"), time="2026-01-01T00:00:00.001Z"))
        assert texts(list(log.read("a"))) == ["once"]

    def test_an_append_that_is_only_partly_in_place_is_refused(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        rows = rows_after(head, note("one"), note("two"))
        log.append("a", 2, 1, rows[:1])
        with pytest.raises(WrongSeq):
            log.append("a", 2, 1, rows)
        assert texts(list(log.read("a"))) == ["one"]

    def test_an_append_that_was_done_before_the_take_over_is_done(self, log: EventLog) -> None:
        head = log.create("a", FIRST, HERE)
        rows = rows_after(head, note("in time"))
        log.append("a", 2, 1, rows)
        self.again(log).take_over("a", HERE, ask=True)
        log.append("a", 2, 1, rows)
        with pytest.raises(FencedOut):
            log.append("a", 3, 1, rows_after(msgspec.structs.replace(head, head_seq=3), note("too late")))
        assert texts(list(log.read("a"))) == ["in time"]

    # taking over

    @pytest.mark.parametrize("ask", [False, True])
    @pytest.mark.parametrize("kind", [RunCompleted, RunStopped])
    def test_a_run_that_is_over_is_taken_over_by_nobody(
        self, log: EventLog, kind: type[RunCompleted] | type[RunStopped], ask: bool
    ) -> None:
        log.create("a", FIRST, HERE)
        append(log, "a", note(), ending(kind))
        before = list(log.read("a"))
        for released in (False, True):
            if released:
                log.release("a", 1)
            with pytest.raises(RunClosed, match=f"'a' is over.*{kind.__name__}"):
                self.again(log).take_over("a", ELSEWHERE, ask=ask)
        assert list(log.read("a")) == before and log.head("a").incarnation == 1

    def test_a_take_over_raises_the_incarnation_and_says_so_in_the_log(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        changes = {"rollout.workers": [1, 4]}
        digests = {"reward": ["old", "new"]}
        head = log.take_over(
            "a",
            ELSEWHERE,
            ask=True,
            config_changes=changes,
            digest_changes=digests,
            accept_divergence=True,
        )
        row = list(log.read("a"))[-1]
        assert row.event() == IncarnationBegan(
            incarnation=2,
            reason=TakeReason.ASKED,
            host=ELSEWHERE.host,
            pid=ELSEWHERE.pid,
            config_changes=changes,
            digest_changes=digests,
            accept_divergence=True,
        )
        assert (row.seq, row.incarnation, row.hash) == (3, 2, head.head_hash)
        assert log.head("a").driver == head.driver == ELSEWHERE

    def test_a_driver_that_was_thought_dead_can_never_write_again(self, log: EventLog) -> None:
        old = log.create("a", FIRST, HERE)
        new = self.again(log)
        head = new.take_over("a", HERE, ask=True)
        outcome: list[BaseException] = []

        def write() -> None:
            try:
                log.append("a", 2, 1, rows_after(old, note("zombie")))
            except SurefootError as error:
                outcome.append(error)

        zombie = threading.Thread(target=write)
        zombie.start()
        zombie.join()
        assert isinstance(outcome[0], FencedOut)
        assert outcome[0].facts == {"run": "a", "mine": 1, "current": 2}
        late = msgspec.structs.replace(old, head_seq=3, head_hash=head.head_hash)
        with pytest.raises(FencedOut):
            log.append("a", 3, 1, rows_after(late, note("zombie that looked at the head")))
        new.append("a", 3, 2, rows_after(head, note("heir")))
        assert texts(list(log.read("a"))) == ["heir"]

    def test_a_live_driver_keeps_its_run_however_long_it_is_silent(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        self.let_pass(log, "a", 3600)
        with pytest.raises(RunInUse, match=r"incarnation 1 .* wrote 36\d\d s ago.*--take-over") as refused:
            log.take_over("a", HERE)
        assert refused.value.facts["incarnation"] == 1
        assert 3600 <= refused.value.facts["heartbeat_age_seconds"] < 3700
        assert log.head("a").head_seq == 2

    def test_a_driver_that_is_dead_on_this_host_is_followed_at_once(
        self, log: EventLog, dead: DriverIdentity
    ) -> None:
        log.create("a", FIRST, dead)
        assert self.reason_of(log, log.take_over("a", HERE)) == TakeReason.DEAD

    def test_a_driver_elsewhere_is_followed_after_30_seconds_of_silence(self, log: EventLog) -> None:
        log.create("a", FIRST, ELSEWHERE)
        self.let_pass(log, "a", 28)
        with pytest.raises(RunInUse, match=r"wrote (28|29) s ago"):
            log.take_over("a", HERE)
        self.let_pass(log, "a", 2)
        assert self.reason_of(log, log.take_over("a", HERE)) == TakeReason.SILENT

    def test_a_released_run_is_free_for_all(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        log.release("a", 1)
        assert log.head("a").released
        head = log.take_over("a", HERE)
        assert self.reason_of(log, head) == TakeReason.ENDED
        assert not head.released
        assert not log.head("a").released

    def test_who_asks_is_not_told_to_have_asked_where_there_was_no_need(
        self, log: EventLog, dead: DriverIdentity
    ) -> None:
        log.create("a", FIRST, dead)
        assert self.reason_of(log, log.take_over("a", HERE, ask=True)) == TakeReason.DEAD

    def test_a_release_by_an_old_driver_frees_nothing(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        self.again(log).take_over("a", HERE, ask=True)
        log.release("a", 1)
        assert not log.head("a").released

    def test_a_heartbeat_makes_the_run_young_again(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        self.let_pass(log, "a", 100)
        assert 100 <= (log.head("a").heartbeat_age_seconds or 0) < 160
        log.heartbeat("a", 1)
        assert (log.head("a").heartbeat_age_seconds or 0) < 60

    def test_an_append_is_a_heartbeat_too(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        self.let_pass(log, "a", 100)
        append(log, "a", note())
        assert (log.head("a").heartbeat_age_seconds or 0) < 60

    def test_a_heartbeat_of_an_old_driver_is_fenced_and_keeps_nothing_alive(self, log: EventLog) -> None:
        log.create("a", FIRST, ELSEWHERE)
        self.again(log).take_over("a", ELSEWHERE, ask=True)
        self.let_pass(log, "a", 31)
        with pytest.raises(FencedOut) as refused:
            log.heartbeat("a", 1)
        assert refused.value.facts == {"run": "a", "mine": 1, "current": 2}
        assert "incarnation 2 (process 4242 on another-host.invalid)" in str(refused.value)
        assert self.reason_of(log, log.take_over("a", HERE)) == TakeReason.SILENT

    # reading beside a writer

    def test_report_43_a_follower_never_skips_a_seq(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        writer = self.again(log)
        done = threading.Event()

        def write() -> None:
            for number in range(150):
                append(writer, "a", *(note(f"{number}.{part}") for part in range(1 + number % 3)))
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        looks_after_the_end = 0

        def wait() -> bool:
            nonlocal looks_after_the_end
            looks_after_the_end += done.is_set()
            return looks_after_the_end < 2

        rows = list(follow(log, "a", wait=wait))
        thread.join()
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) == log.head("a").head_seq == 2 + 300
        assert verify_chain(rows) == log.head("a").head_hash

    def test_two_threads_may_share_a_log(self, log: EventLog) -> None:
        runs = ("a", "b")
        for run_id in runs:
            log.create(run_id, FIRST, HERE)

        def write(run_id: str) -> None:
            for number in range(50):
                append(log, run_id, note(f"{run_id} {number}"))
                log.heartbeat(run_id, 1)

        threads = [threading.Thread(target=write, args=(run_id,)) for run_id in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for run_id in runs:
            assert texts(list(log.read(run_id))) == [f"{run_id} {number}" for number in range(50)]

    def test_a_log_may_be_closed_twice(self, log: EventLog) -> None:
        log.create("a", FIRST, HERE)
        log.close()
        log.close()

    @staticmethod
    def reason_of(log: EventLog, head: Any) -> TakeReason:
        event = list(log.read(head.run_id))[-1].event()
        assert isinstance(event, IncarnationBegan)
        return event.reason
