"""The audit of what lies on disk and of what is done again from it: checkpoints, redo, retired files.

Owns the hash of every row that went by (a checkpoint names one) and the checkpoints that are kept. The
invariant that it looks for: at every seq, what is kept is enough to redo what is not covered.
"""

from __future__ import annotations

from contextlib import suppress

from .audit_findings import Facts
from .audit_groups import GroupAudit
from .audit_learning import LearningAudit
from .events import CheckpointCommitted, CheckpointLost, FilesRetired, UpdatesRedone

_DIGEST_BYTES = 32
_LARGEST_GAP = 1 << 20  # missing rows beyond this are not made room for


class StorageAudit:
    """Every checkpoint, redo and retirement."""

    def __init__(self, facts: Facts, groups: GroupAudit, learning: LearningAudit) -> None:
        self._facts = facts
        self._groups = groups
        self._learning = learning
        self._hashes = bytearray()  # of every row that went by
        self.new_hashes: list[str] = []  # those of the rows after these, as they are in the rows
        self.kept: dict[str, int] = {}  # path -> update
        self._paths: set[str] = set()  # those there ever were
        self._usable: set[int] = {0}  # updates that a redo may start from: committed, not lost
        self._redo_base = 0  # newest kept checkpoint when the learner was last lost
        self._redone_to = 0  # update that this learner try has reached by redo
        self.committed = 0
        self.redone_updates = 0

    def pack_hashes(self) -> None:
        """Keep the new hashes as bytes: 32 a row, where text is three times that."""
        self._hashes += bytes.fromhex("".join(self.new_hashes))
        self.new_hashes.clear()

    def remember_hash(self, seq: int, digest: str) -> None:
        """Keep the hash of a row that may be none, or of another seq than the next."""
        self.pack_hashes()
        missing = (seq - 1) * _DIGEST_BYTES - len(self._hashes)
        if missing:
            if not 0 < missing <= _LARGEST_GAP * _DIGEST_BYTES:
                return
            self._hashes += bytes(missing)
        with suppress(ValueError):
            self._hashes += bytes.fromhex(digest)
        length = seq * _DIGEST_BYTES
        if len(self._hashes) != length:  # it was no hash, which has been reported
            del self._hashes[length - _DIGEST_BYTES :]
            self._hashes += bytes(_DIGEST_BYTES)

    def newest(self) -> int:
        """The update of the newest kept checkpoint; 0 is the initial weights."""
        return max(self.kept.values(), default=0)

    def learner_gone(self) -> None:
        """A learner must be built again, from the newest checkpoint."""
        self._redo_base = self.newest()
        self._redone_to = 0

    def check_ready(self, update: int, seq: int) -> None:
        """The learner says that it holds the weights of an update."""
        facts = self._facts
        if update != facts.updates:
            facts.violation(
                "redo", seq, f"the learner was ready with update {update}, the log holds {facts.updates}"
            )
        elif facts.updates > max(self.newest(), self._redone_to):
            facts.violation(
                "redo",
                seq,
                f"the learner was ready with update {update}, but the newest checkpoint is of update"
                f" {self.newest()} and nothing was redone after it",
            )

    def on_checkpoint(self, event: CheckpointCommitted, seq: int) -> None:
        facts, budget, learning = self._facts, self._facts.budget, self._learning
        name = f"checkpoint {event.path} of update {event.update}"
        if event.path in self._paths:
            facts.violation("files", seq, f"checkpoint {event.path} was written a second time")
        self._paths.add(event.path)
        recorded = 1 <= event.update <= len(learning.update_seqs)
        if not recorded or learning.update_seqs[event.update - 1] > event.head_seq:
            facts.violation("checkpoints", seq, f"{name} names head {event.head_seq}, which does not hold it")
        if not self._is_row(event.head_seq, event.head_hash) or event.head_seq >= seq:
            facts.violation(
                "checkpoints", seq, f"{name} names head {event.head_seq} with a hash that no earlier row has"
            )
        if budget is not None:
            optimizer_steps = event.update * budget.minibatches * budget.passes
            if event.optimizer_steps != optimizer_steps:
                facts.violation(
                    "checkpoints",
                    seq,
                    f"{name} says {event.optimizer_steps} optimizer steps, by then it is {optimizer_steps}",
                )
        version = learning.policy_version_at(event.update, event.head_seq)
        if event.policy_version != version:
            facts.violation(
                "checkpoints",
                seq,
                f"{name} says policy version {event.policy_version}, that of its update is {version}",
            )
        self.committed += 1
        self.kept[event.path] = event.update
        self._usable.add(event.update)

    def on_checkpoint_lost(self, event: CheckpointLost, seq: int) -> None:
        if self.kept.pop(event.path, None) != event.update:
            self._facts.violation(
                "checkpoints", seq, f"checkpoint {event.path} of update {event.update} was lost, but not kept"
            )
        if event.update not in self.kept.values():
            self._usable.discard(event.update)
        self._redo_base = min(self._redo_base, self.newest())

    def on_redone(self, event: UpdatesRedone, seq: int) -> None:
        facts = self._facts
        if event.learner_try != facts.learner_try:
            facts.violation(
                "workers", seq, f"a redo is of learner try {event.learner_try}, not {facts.learner_try}"
            )
        if facts.learner_ready:
            facts.violation("redo", seq, "updates were redone after the learner was ready")
        span = f"updates {event.first_update} to {event.last_update} were redone"
        if not event.checkpoint_update < event.first_update <= event.last_update <= facts.updates:
            facts.violation(
                "redo", seq, f"{span} from {event.checkpoint_update}, recorded are {facts.updates}"
            )
        elif event.first_update != event.checkpoint_update + 1 or event.last_update != facts.updates:
            facts.violation(
                "redo",
                seq,
                f"{span} from {event.checkpoint_update}: due is every update after it, up to {facts.updates}",
            )
        if event.checkpoint_update not in self._usable or event.checkpoint_update < self._redo_base:
            facts.violation(
                "redo",
                seq,
                f"{span} from a checkpoint of update {event.checkpoint_update}, the newest was of"
                f" {self._redo_base}",
            )
        deviates = event.loss_deviation != 0 or event.grad_norm_deviation != 0
        accepted = event.accepted_divergence and facts.divergence_accepted
        if (event.same_execution and deviates and not accepted) or (
            event.accepted_divergence and not accepted
        ):
            facts.violation(
                "redo",
                seq,
                f"{span} on the same execution with deviations {event.loss_deviation} of loss and"
                f" {event.grad_norm_deviation} of gradient norm, which nobody accepted",
            )
        self._redone_to = event.last_update
        self.redone_updates += max(0, event.last_update - event.first_update + 1)

    def on_retired(self, event: FilesRetired, seq: int) -> None:
        facts, files = self._facts, self._groups.files
        for path in event.checkpoints:
            if self.kept.pop(path, None) is None:
                facts.violation("files", seq, f"checkpoint {path} was retired, but not kept")
        if event.checkpoints and not self.kept:
            facts.violation("files", seq, "the last checkpoint was retired")
        covered = min(self.kept.values(), default=0)
        for name in event.group_files:
            use = files.pop(name, None)
            if use is None:
                facts.violation("files", seq, f"group file {name} was retired, but not there")
            elif use.waiting > 0:
                facts.violation(
                    "files",
                    seq,
                    f"group file {name} was retired, {use.waiting} of its groups wait for training",
                )
            elif use.last_update > covered:
                facts.violation(
                    "files",
                    seq,
                    f"group file {name} was retired, a redo of update {use.last_update} needs it: every kept"
                    f" checkpoint covers {covered}",
                )
        if event.group_files and facts.groups_kept:
            facts.violation("files", seq, "group files were retired, but groups.keep is all")

    def _is_row(self, seq: int, digest: str) -> bool:
        self.pack_hashes()
        place = (seq - 1) * _DIGEST_BYTES
        return 0 <= place < len(self._hashes) and self._hashes[place : place + _DIGEST_BYTES].hex() == digest
