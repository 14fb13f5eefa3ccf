"""The audit of groups: admission, fates, attempts, samples, and what was dropped against what was trained.

Owns one byte of fate per prompt index and a record per group that is still alive. Invariant: a fate changes
only here, so a group that is in two of them, or in none, has been reported at the seq where that began.
"""

from __future__ import annotations

from operator import le
from typing import Any

import msgspec

from .audit_findings import Facts, Tally
from .events import (
    AnswerRefused,
    AttemptFailed,
    DropReason,
    GroupsAdmitted,
    GroupsDropped,
    GroupsReissued,
    GroupsStored,
    IssueReason,
    StoredGroup,
)

NONE, UNDER_WAY, LOST, STORED, TRAINED, DROPPED = range(6)
"""Fates. A group whose attempt is lost and not issued again yet is still admitted."""

FATE_NAMES = ("not drawn", "admitted", "admitted", "stored", "trained", "dropped")

_LOSE_ATTEMPTS = bytes(LOST if fate == UNDER_WAY else fate for fate in range(256))
_SURVIVING = bytes((UNDER_WAY, LOST, STORED))
_LARGEST_GAP = 1 << 20  # prompt indices further ahead than this are reported and not followed


class LiveGroup(msgspec.Struct, gc=False):
    """A group on its way: its attempt and, once stored, what the log says of its samples."""

    attempt: int
    admission_version: int
    file: str = ""
    oldest_version: int = 0
    oldest_version_sum: int = 0
    samples: int = 0
    tokens: int = 0
    reward_sum: float = 0.0


class FileUse(msgspec.Struct, gc=False):
    """A group file: how many of its groups may still be trained, and the last update that trained one."""

    waiting: int
    last_update: int = 0


class GroupAudit:
    """Every group from its admission to its fate."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.fates = bytearray()  # by prompt index
        self.live: dict[int, LiveGroup] = {}
        self.ready: dict[int, None] = {}  # stored groups in the order of their storing
        self.files: dict[str, FileUse] = {}  # those that are not retired
        self._file_names: set[str] = set()  # those there ever were
        self.drawn = 0
        self.dropped = 0
        self.reissued = 0
        self.refused = 0
        self.most_in_window = 0  # largest number admitted and not dropped
        self.tallies = {fate: Tally() for fate in ("trained", "dropped", "reissued")}
        self._trained = self.tallies["trained"]
        self._next_survivor = 0  # below it every prompt is trained or dropped

    def survivors_in_draw_order(self, groups: int) -> list[int]:
        """The next groups in draw order that are neither trained nor dropped; fewer if fewer are drawn."""
        fates, index = self.fates, self._next_survivor
        while index < len(fates) and fates[index] >= TRAINED:
            index += 1
        self._next_survivor = index
        ahead = fates[index : index + groups]
        if not ahead.translate(None, _SURVIVING):  # none among them that does not survive, as a rule
            return list(range(index, index + len(ahead)))
        found: list[int] = []
        while len(found) < groups and index < len(fates):
            if UNDER_WAY <= fates[index] <= STORED:
                found.append(index)
            index += 1
        return found

    def by_fate(self) -> dict[str, int]:
        """How many groups are in each fate."""
        count = self.fates.count
        return {
            "admitted": count(UNDER_WAY) + count(LOST),
            "stored": count(STORED),
            "trained": count(TRAINED),
            "dropped": count(DROPPED),
        }

    def lose_attempts(self) -> None:
        """A new incarnation: what was being generated must be issued again."""
        self.fates = self.fates.translate(_LOSE_ATTEMPTS)

    def train(self, prompt_index: int, attempt: int, update: int, seq: int) -> LiveGroup | None:
        """Move a group to trained, in an update; what was stored of it, if it was."""
        fates = self.fates
        fate = fates[prompt_index] if 0 <= prompt_index < len(fates) else NONE
        group = self.live.get(prompt_index)
        if fate == TRAINED:
            self._facts.violation("trained_once", seq, f"group {prompt_index} is trained a second time")
            return None
        if fate != STORED or group is None:
            self._facts.violation(
                "fates", seq, f"group {prompt_index} is trained, but was {FATE_NAMES[fate]}"
            )
        elif attempt != group.attempt:
            self._facts.violation(
                "attempts",
                seq,
                f"attempt {attempt} of group {prompt_index} is trained, attempt {group.attempt} is stored",
            )
        if fate != NONE:
            fates[prompt_index] = TRAINED
            self.live.pop(prompt_index, None)
            self.ready.pop(prompt_index, None)
        if group is None or fate != STORED:
            return None
        self._trained.add(group)
        self._leave_file(group.file, update)
        return group

    def on_admitted(self, event: GroupsAdmitted, seq: int) -> None:
        facts, fates, live, version = self._facts, self.fates, self.live, self._facts.policy_version
        facts.worked(seq, "groups were admitted")
        if facts.exhausted:
            facts.violation("admission", seq, "groups were admitted after what was left had been dropped")
        for issue in event.groups:
            index = issue.prompt_index
            if index != len(fates):
                facts.violation(
                    "admission", seq, f"prompt {index} was drawn, the next in draw order is {len(fates)}"
                )
                if not self._reach(index):
                    continue
            if issue.attempt != 1:
                facts.violation(
                    "attempts", seq, f"group {index} was admitted as attempt {issue.attempt}, not 1"
                )
            if issue.admission_version != version:
                facts.violation(
                    "admission",
                    seq,
                    f"group {index} was admitted at version {issue.admission_version},"
                    f" the policy version was {version}",
                )
            if index == len(fates):
                fates.append(UNDER_WAY)
            else:
                if fates[index] != NONE:
                    facts.violation(
                        "fates",
                        seq,
                        f"group {index} was admitted, but was {FATE_NAMES[fates[index]]} already",
                    )
                    continue
                fates[index] = UNDER_WAY
            self.drawn += 1
            live[index] = LiveGroup(issue.attempt, issue.admission_version)
        self._check_window(seq)

    def _check_window(self, seq: int) -> None:
        facts, budget = self._facts, self._facts.budget
        survivors = self.drawn - self.dropped
        if survivors > self.most_in_window:
            self.most_in_window = survivors
        if budget is None:
            return
        if survivors > facts.prompts_needed:
            facts.violation(
                "admission",
                seq,
                f"{survivors} groups are admitted and not dropped, the budget needs {facts.prompts_needed}",
            )
        if self.drawn > budget.prompts_total:
            facts.violation(
                "admission",
                seq,
                f"{self.drawn} prompts were drawn, prompts_total is {budget.prompts_total}",
            )
        if facts.max_staleness is None:
            return
        window = (
            (facts.max_staleness + facts.policy_version + 1) * budget.every_updates * budget.batch_prompts
        )
        if survivors > window:
            facts.violation(
                "admission",
                seq,
                f"{survivors} groups are admitted and not dropped, the window at version"
                f" {facts.policy_version} holds {window}",
            )

    def on_reissued(self, event: GroupsReissued, seq: int) -> None:
        facts, stale = self._facts, event.reason is IssueReason.STALE
        facts.worked(seq, "groups were issued again")
        if stale and not facts.reissue_stale:
            facts.violation(
                "admission", seq, "stale groups were issued again, but sync.on_stale is not reissue"
            )
        for issue in event.groups:
            index = issue.prompt_index
            fate, group = self._fate(index), self.live.get(index)
            if group is None:
                facts.violation("fates", seq, f"group {index} was issued again, but was {FATE_NAMES[fate]}")
                continue
            if issue.attempt != group.attempt + 1:
                facts.violation(
                    "attempts",
                    seq,
                    f"attempt {issue.attempt} of group {index} was issued after attempt {group.attempt}",
                )
            version = facts.policy_version if stale else group.admission_version
            if issue.admission_version != version:
                facts.violation(
                    "admission",
                    seq,
                    f"group {index} was issued again at version {issue.admission_version}, due is {version}",
                )
            self.reissued += 1
            if fate == STORED:
                self.tallies["reissued"].add(group)
                self._leave_file(group.file, 0)
                self.ready.pop(index, None)
            else:
                self.tallies["reissued"].unanswered += 1
            self.fates[index] = UNDER_WAY
            self.live[index] = LiveGroup(issue.attempt, issue.admission_version)

    def on_failed(self, event: AttemptFailed, seq: int) -> None:
        index = event.prompt_index
        group = self.live.get(index)
        if group is None or self.fates[index] != UNDER_WAY or group.attempt != event.attempt:
            self._facts.violation(
                "attempts", seq, f"attempt {event.attempt} of group {index} failed, but was not under way"
            )
            return
        self.fates[index] = LOST

    def on_stored(self, event: GroupsStored, seq: int) -> None:
        file, fates, live = event.file, self.fates, self.live
        self._facts.worked(seq, "groups were stored")
        if file in self._file_names:
            self._facts.violation("files", seq, f"group file {file} was written a second time")
        self._file_names.add(file)
        use = self.files.setdefault(file, FileUse(0))
        for stored in event.groups:
            index = stored.prompt_index
            fate = fates[index] if 0 <= index < len(fates) else NONE
            group = live.get(index)
            if group is None or fate == STORED:
                self._facts.violation(
                    "fates",
                    seq,
                    f"group {index} was stored, but was {FATE_NAMES[fate]} already"
                    if fate != NONE
                    else f"group {index} was stored, but was never admitted",
                )
                continue
            if stored.attempt != group.attempt or fate == LOST:
                self._facts.violation(
                    "attempts",
                    seq,
                    f"attempt {stored.attempt} of group {index} was stored, but under way was "
                    + ("none" if fate == LOST else f"attempt {group.attempt}"),
                )
            use.waiting += 1
            self._keep_samples(group, stored, file, seq)
            fates[index] = STORED
            self.ready[index] = None

    def _keep_samples(self, group: LiveGroup, stored: StoredGroup, file: str, seq: int) -> None:
        facts, index = self._facts, stored.prompt_index
        rewards: list[Any] = stored.rewards
        oldest, newest, lengths = stored.oldest_versions, stored.newest_versions, stored.lengths
        samples, group_size = len(oldest), facts.group_size
        if (
            not samples == len(newest) == len(lengths) == len(rewards) == len(stored.truncated)
            or samples == 0
            or (samples != group_size and group_size is not None)
        ):
            facts.violation(
                "samples",
                seq,
                f"group {index} was stored with {len(rewards)} rewards, {len(lengths)} lengths and"
                f" {samples} versions, batch.group_size is {group_size}",
            )
        if samples:
            # one version made it all, as a rule: to compare and count is a fraction of min, max and sum
            one_version = oldest == newest and oldest.count(oldest[0]) == samples
            low = oldest[0] if one_version else min(oldest)
            high = low if one_version else max(newest or oldest)
            group.oldest_version_sum = low * samples if one_version else sum(oldest)
            if (
                low < group.admission_version
                or high > facts.policy_version
                or (oldest != newest and not all(map(le, oldest, newest)))
            ):
                facts.violation(
                    "samples",
                    seq,
                    f"group {index} has tokens of versions {low} to {high}, it was admitted at"
                    f" {group.admission_version} and stored at {facts.policy_version}",
                )
            group.oldest_version = low
        group.file = file
        group.samples = samples
        group.tokens = sum(lengths)
        try:
            group.reward_sum = sum(rewards)
        except TypeError:  # a string is among them, for a number that JSON has not
            group.reward_sum = sum(map(float, rewards))

    def on_dropped(self, event: GroupsDropped, seq: int) -> None:
        for index in event.prompt_indices:
            fate, group = self._fate(index), self.live.pop(index, None)
            if group is None:
                self._facts.violation("fates", seq, f"group {index} was dropped, but was {FATE_NAMES[fate]}")
                continue
            if fate == STORED:
                self.tallies["dropped"].add(group)
                self._leave_file(group.file, 0)
                self.ready.pop(index, None)
            else:
                self.tallies["dropped"].unanswered += 1
            self.fates[index] = DROPPED
            self.dropped += 1
        if event.reason is DropReason.UNUSED:
            self._facts.exhausted = True

    def on_refused(self, event: AnswerRefused, seq: int) -> None:
        index = event.prompt_index
        group = self.live.get(index)
        self.refused += 1
        if group is None:
            if self._fate(index) == NONE:
                self._facts.violation(
                    "attempts", seq, f"an answer of group {index} was refused, never admitted"
                )
        elif event.attempt > group.attempt or (
            event.attempt == group.attempt and self.fates[index] == UNDER_WAY
        ):
            self._facts.violation(
                "attempts",
                seq,
                f"an answer of attempt {event.attempt} of group {index} was refused, under way was attempt"
                f" {group.attempt}",
            )

    def _leave_file(self, file: str, update: int) -> None:
        use = self.files.get(file)
        if use is not None:  # else it was retired too early, and reported
            use.waiting -= 1
            if update > use.last_update:
                use.last_update = update

    def _fate(self, prompt_index: int) -> int:
        return self.fates[prompt_index] if 0 <= prompt_index < len(self.fates) else NONE

    def _reach(self, prompt_index: int) -> bool:
        """Make room for an index out of order; False for one too far off to follow."""
        gap = prompt_index - len(self.fates)
        if prompt_index < 0 or gap > _LARGEST_GAP:
            return False
        self.fates.extend(bytes(max(0, gap)))
        return True
