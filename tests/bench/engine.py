"""The engine's tokens a second against transformers' `generate` on the same model and batch.

64 samples of 16 prompt and 32 new tokens, hidden 128, 4 layers, fp32, two threads, sampled at temperature 1,
end token disabled on both sides. Every prompt is another, so nothing is shared. Rounds are interleaved in a
process of its own (`python -m tests.bench.engine`).
"""

from __future__ import annotations

import random
import sys
import tempfile
from typing import Any

from .figures import Bench, Figure, answer, ratio_of_rounds, settings_of, timed

SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 64, 16, 32
VOCABULARY, HIDDEN, LAYERS, HEADS = 98, 128, 4, 4


def measure(bench: Bench) -> list[Figure]:
    """One figure."""
    rounds = 4 if bench.quick else 15
    bench.say(f"{rounds} rounds of generation")
    found = bench.ask_child("engine", {"rounds": rounds, "threads": 2})
    tokens = SAMPLES * NEW_TOKENS
    return [
        Figure(
            "engine",
            ratio_of_rounds(found["theirs"], found["ours"]),
            says="engine's tokens a second / transformers' generate, same model and batch",
            details={
                "tokens_per_second": tokens * rounds / sum(found["ours"]),
                "generate_tokens_per_second": tokens * rounds / sum(found["theirs"]),
                "best_tokens_per_second": tokens / min(found["ours"]),
                "best_generate_tokens_per_second": tokens / min(found["theirs"]),
            },
        )
    ]


def build(folder: str) -> tuple[Any, Any]:
    """Transformers' model, saved in `folder`, and the engine with the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surefoot.rollout.architecture import read_architecture
    from surefoot.rollout.torch_engine import TorchEngine

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=PROMPT_TOKENS + NEW_TOKENS,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    model.save_pretrained(folder)
    architecture = read_architecture(folder)
    engine = TorchEngine(architecture, slots=SAMPLES, max_tokens=PROMPT_TOKENS + NEW_TOKENS, stop_ids=())
    named = dict(model.named_parameters())
    engine.load_weights(0, {name: named[name].detach() for name in architecture.parameter_shapes()})
    return model, engine


def main() -> None:
    settings = settings_of(sys.argv)
    import torch

    from surefoot.rollout.engine import generate_batch

    torch.set_num_threads(settings["threads"])
    with tempfile.TemporaryDirectory() as folder:
        model, engine = build(folder)
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(SAMPLES)]
    ids = torch.tensor(prompts)

    def theirs() -> None:
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            )  # fmt: skip
        assert found.shape == (SAMPLES, PROMPT_TOKENS + NEW_TOKENS)

    def ours() -> None:
        seeds = [[draw.randrange(1 << 60)] for _ in prompts]
        found = generate_batch(engine, prompts, seeds=seeds, temperature=1.0, max_new_tokens=NEW_TOKENS)
        assert all(len(samples[0].ids) == NEW_TOKENS for samples in found)

    ours()
    theirs()
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(settings["rounds"]):
        seconds["theirs"].append(timed(theirs))
        seconds["ours"].append(timed(ours))
    answer(seconds)


if __name__ == "__main__":
    main()
