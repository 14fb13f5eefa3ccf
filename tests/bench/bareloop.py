"""GRPO as a bare loop in one process: what the product's seconds per update are measured against.

transformers' model and cache, left-padded prompts repeated once per sample, a plain key-value loop (not
`generate`, which is slower), exact-match rewards, design.md's loss, AdamW and a cosine schedule. No log, no
store, no checkpoint, no publication. Run as a child process; prints its seconds per step.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from .figures import answer, settings_of
from .workload import GROUP_SIZE, LEARNING_RATE, MAX_NEW_TOKENS, PROMPTS, sums


class BareLoop:
    """Model, optimizer and prompts of one run."""

    def __init__(self, model: str, threads: int, steps: int) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        config = self.model.generation_config
        self.end, self.pad = config.eos_token_id, config.pad_token_id
        self.rows = sums(steps * PROMPTS)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda k: 0.5 * (1 + math.cos(math.pi * k / steps))
        )

    def step(self, number: int) -> dict[str, float]:
        """One update; where its seconds went."""
        rows = self.rows[number * PROMPTS : (number + 1) * PROMPTS]
        began, processor = time.perf_counter(), time.process_time()
        prompts, mask = self.prompts([row["prompt"] for row in rows])
        ids, logprobs, alive = self.generate(prompts, mask)
        generated = time.perf_counter()
        advantages = self.advantages(rows, ids, alive)
        self.train(prompts, mask, ids, logprobs, alive, advantages)
        ended = time.perf_counter()
        return {
            "generate": generated - began,
            "train": ended - generated,
            "all": ended - began,
            "processor": time.process_time() - processor,
        }

    def prompts(self, texts: list[str]) -> tuple[Any, Any]:
        """Left-padded ids and mask, `[prompts * samples, prompt]`."""
        torch = self.torch
        encoded = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        width = max(map(len, encoded))
        ids = torch.tensor([[self.pad] * (width - len(one)) + one for one in encoded])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in encoded])
        return ids.repeat_interleave(GROUP_SIZE, 0), mask.repeat_interleave(GROUP_SIZE, 0)

    def generate(self, prompts: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Sampled ids, their log-probabilities, and which of them count: each `[samples, new]`."""
        torch = self.torch
        ids: list[Any] = []
        logprobs: list[Any] = []
        counts: list[Any] = []
        running = torch.ones(len(prompts), dtype=torch.bool)
        with torch.no_grad():  # the ids go into the backward pass
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            taken, cache = prompts, None
            for _ in range(MAX_NEW_TOKENS):
                output = self.model(
                    input_ids=taken, attention_mask=mask, position_ids=positions, past_key_values=cache,
                    use_cache=True, logits_to_keep=1,
                )  # fmt: skip
                cache = output.past_key_values
                distribution = torch.log_softmax(output.logits[:, -1], -1)
                chosen = torch.multinomial(distribution.exp(), 1)
                ids.append(chosen)
                logprobs.append(distribution.gather(1, chosen))
                counts.append(running)
                running = running & (chosen[:, 0] != self.end)
                if not running.any():
                    break
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                positions = positions[:, -1:] + 1
                taken = chosen
        return torch.cat(ids, 1), torch.cat(logprobs, 1), torch.stack(counts, 1)

    def advantages(self, rows: list[dict[str, str]], ids: Any, alive: Any) -> Any:
        """Reward less the group's mean over its unbiased deviation + 1e-4, `[samples, 1]`."""
        texts = [
            self.tokenizer.decode([token for token, counts in zip(*pair, strict=True) if counts])
            for pair in zip(ids.tolist(), alive.tolist(), strict=True)
        ]
        rewards = [float(text.strip() == rows[i // GROUP_SIZE]["answer"]) for i, text in enumerate(texts)]
        grouped = self.torch.tensor(rewards).view(-1, GROUP_SIZE)
        centred = grouped - grouped.mean(1, keepdim=True)
        return (centred / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)

    def train(self, prompts: Any, mask: Any, ids: Any, old: Any, alive: Any, advantages: Any) -> None:
        """One optimizer step on the padded batch."""
        torch = self.torch
        whole = torch.cat([prompts, ids[:, :-1]], 1)
        attention = torch.cat([mask, alive[:, :-1].long()], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        output = self.model(
            input_ids=whole, attention_mask=attention, position_ids=positions, use_cache=False,
            logits_to_keep=ids.shape[1],
        )  # fmt: skip
        new = torch.log_softmax(output.logits, -1).gather(2, ids.unsqueeze(2)).squeeze(2)
        ratio = torch.exp(new - old)
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -(surrogate * alive).sum() / alive.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def main() -> None:
    settings = settings_of(sys.argv)
    steps, skip = settings["updates"], settings["skip"]
    loop = BareLoop(settings["model"], settings["threads"], steps)
    seconds = [loop.step(number) for number in range(steps)][skip:]
    answer({part: sum(step[part] for step in seconds) / len(seconds) for part in seconds[0]})


if __name__ == "__main__":
    main()
