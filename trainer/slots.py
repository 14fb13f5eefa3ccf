"""How many workers and ranks a local Ray has room for; known without Ray, so that `plan` can say it.

Owns no state. A slot is what Ray calls a CPU: a place for one worker or rank, not a core of its own.
"""

from __future__ import annotations

import os

FEWEST_SLOTS = 8
SLOTS_PER_CORE = 4


def local_slots(slots: int | None) -> int:
    """The slots of a local Ray that is asked for `slots` (cluster.slots; None: what suits this machine)."""
    return slots or max(FEWEST_SLOTS, SLOTS_PER_CORE * len(os.sched_getaffinity(0)))
