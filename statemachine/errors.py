"""Every error that Surefoot raises on purpose.

An error has a stable `code`, its facts as typed attributes that survive pickling, and a message of one
line that names the value, the rule and the way out. `UserMistake` and its children end the command line
with exit code 2; everything else under `SurefootError` with exit code 1.
"""

from __future__ import annotations

import errno
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


def described(error: BaseException) -> str:
    """What went wrong; for a full disk, which file, and the way out."""
    if isinstance(error, OSError) and error.errno in _FULL:
        file = f" for {error.filename}" if error.filename else ""
        return f"the disk has no room{file} ({error.strerror}): make room and run the same command again"
    return str(error) or type(error).__name__


class SurefootError(Exception):
    """Base of all. Keyword facts become attributes and survive pickling."""

    code = "surefoot"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[SurefootError], message: str, facts: dict[str, Any]) -> SurefootError:
    return kind(message, **facts)


class UserMistake(SurefootError, ValueError):
    """Something the user can put right; nothing was changed."""

    code = "user_mistake"


class BudgetRefused(UserMistake):
    """The config and the data cannot give one optimizer step, or contradict each other."""

    code = "budget_refused"


class ConfigRefused(UserMistake):
    """A config key or value that is not allowed."""

    code = "config_refused"


class DataRefused(UserMistake):
    """A data file that is missing, empty or malformed; names the line."""

    code = "data_refused"


class ModelRefused(UserMistake):
    """A model folder that is none, or an architecture that no engine runs."""

    code = "model_refused"


class ClusterTooSmall(UserMistake):
    """More workers, ranks or GPUs than the cluster has."""

    code = "cluster_too_small"


class RunInUse(UserMistake):
    """A live driver holds the run: its incarnation and the age of its last heartbeat."""

    code = "run_in_use"


class RunUnknown(UserMistake, KeyError):
    """No run of that name."""

    code = "run_unknown"

    def __str__(self) -> str:
        return self.message


class RunExists(UserMistake):
    """A run of that name is there already."""

    code = "run_exists"


class ConfigChanged(UserMistake):
    """The config differs from the run's in a key that fixes its accounting or its numbers."""

    code = "config_changed"


class SchemaTooNew(UserMistake):
    """The database was written by a newer Surefoot."""

    code = "schema_too_new"


class LogError(SurefootError):
    """The log could not do what was asked of it."""

    code = "log"


class FencedOut(LogError):
    """A newer incarnation owns the run; this driver must stop. Facts: run, mine, current."""

    code = "fenced_out"


class WrongSeq(LogError):
    """Another writer has appended where this one expected to. Facts: run, expected, found."""

    code = "wrong_seq"


class LogBroken(LogError):
    """A row is missing, torn, edited or unknown. Facts: run, seq."""

    code = "log_broken"


class LogUnavailable(LogError, OSError):
    """The database did not answer or could not write. What was asked may have been done or not; to ask for
    the very same again is safe."""

    code = "log_unavailable"


class IllegalEvent(SurefootError, RuntimeError):
    """An event that the folded state does not allow. Facts: seq, event."""

    code = "illegal_event"


class RunFailedError(SurefootError):
    """The run cannot go on. Facts: whatever names the cause (prompt_index, update, ...)."""

    code = "run_failed"


class Diverged(RunFailedError):
    """A redone update differs from its record where it should not. Facts: seq, update."""

    code = "diverged"


class RunClosed(LogError):
    """The run is over for good: nobody takes it over. Facts: run, ending."""

    code = "run_closed"


class GroupUnusable(SurefootError, OSError):
    """A group file is missing or does not match its digest. Facts: file, prompt_index."""

    code = "group_unusable"


class RewardFailed(SurefootError, RuntimeError):
    """A reward function raised, ran out of time or gave no finite number. Facts: row_index."""

    code = "reward_failed"


class CheckpointUnusable(SurefootError, OSError):
    """A checkpoint is missing or does not match its manifest. Facts: path."""

    code = "checkpoint_unusable"


class LearnerGone(SurefootError):
    """A learner rank died or hung; the group is rebuilt. Facts: learner_try, rank."""

    code = "learner_gone"


class TimedOut(SurefootError, TimeoutError):
    """A bounded wait ran out. Facts: waited_for, seconds."""

    code = "timed_out"
