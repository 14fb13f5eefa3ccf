"""How long a checkpoint holds the learner up, against a blocking save of the same state.

One learner rank in a process of its own (`python -m tests.bench.stalls`), with the state of a model that is
large enough for a checkpoint to be worth measuring. The stall is the rank's `begin_save`, which is what the
driver waits for before it goes on; the blocking save is torch.distributed.checkpoint's, of the same tensors
to the same disk, with its files made durable. Both in turn.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from .figures import Bench, Figure, answer, ratio_of_rounds, settings_of

HIDDEN, LAYERS, HEADS, VOCABULARY = 512, 8, 8, 512


def measure(bench: Bench) -> list[Figure]:
    """One figure."""
    rounds = 2 if bench.quick else 6
    layers = 2 if bench.quick else LAYERS
    bench.say(f"{rounds} rounds of both kinds of checkpoint")
    folder = bench.folder / "stalls"
    folder.mkdir()
    found = bench.ask_child("stalls", {"folder": str(folder), "rounds": rounds, "layers": layers})
    return [
        Figure(
            "checkpoint_stall",
            ratio_of_rounds(found["stalls"], found["blocking"]),
            at_most=0.3,
            says=f"learner's stall at a checkpoint / blocking save, {found['megabytes']:.0f} MB of state",
            details=found,
        )
    ]


def write_model(folder: Path, layers: int) -> Path:
    """A Llama of some 4 million parameters a layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    settings = settings_of(sys.argv)
    folder, rounds = Path(settings["folder"]), settings["rounds"]
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from surefoot.rollout.files import Files
    from surefoot.trainer.checkpoints import Checkpoints
    from surefoot.trainer.rankactor import RankActor

    from ..trainer.learner_world import LearnerScenario, make_group

    scenario = LearnerScenario(write_model(folder / "model", settings["layers"]), data_len=2 * (rounds + 2))
    actor = RankActor()  # not as a Ray actor, but with its settings of the process
    place = {"rank": 0, "ranks": 1, "address": "127.0.0.1", "timeout_seconds": 60.0, "one_host": True}
    place["port"] = actor.open_store("127.0.0.1", 60.0)
    actor.start(place, msgspec.msgpack.encode(scenario.begin().new_rows()))
    rank = actor._rank
    storage = str(folder / "storage")
    checkpoints, files = Checkpoints(storage), Files(storage)
    stalls: list[float] = []
    behind: list[float] = []
    blocking: list[float] = []
    for turn in range(rounds + 1):
        first = 2 * turn
        groups = [make_group(first + i, [3, 4], [0.0, 1.0]) for i in range(2)]
        scenario.batch_of(groups)
        update = scenario.updates + 1
        scenario.applied_as(rank.update(update, groups, scenario.new_rows()))
        path = f"begun-{turn}"
        checkpoints.make_folder(path)
        began = time.perf_counter()
        rank.begin_save(storage, path)
        stalls.append(time.perf_counter() - began)
        rank.finish_save(storage, path)
        files.sync(f"checkpoints/{path}")
        behind.append(time.perf_counter() - began)
        name = f"blocking-{turn}"
        files.make_folder(name)
        began = time.perf_counter()
        save(rank._tensors(), storage_writer=FileSystemWriter(files.path(name)))
        files.sync(name)
        blocking.append(time.perf_counter() - began)
        files.delete(name)
        checkpoints.delete(path)
    megabytes = sum(tensor.nbytes for tensor in rank._tensors().values()) / 1e6
    rank.leave()
    answer(
        {
            "megabytes": megabytes,
            "stalls": stalls[1:],
            "stall_of_the_first": stalls[0],
            "until_durable": behind[1:],
            "blocking": blocking[1:],
        }
    )


if __name__ == "__main__":
    main()
