"""What the light commands load stays light."""

import subprocess
import sys

LIGHT = ["data", "files", "protocols", "rewards", "sources", "store", "tasks", "templates", "tokens"]
HEAVY = {"torch", "ray", "transformers", "reasoning_gym", "pyarrow", "numpy", "matplotlib"}


def test_data_tokens_tasks_rewards_and_store_load_nothing_heavy():
    code = (
        f"import sys; import {', '.join(f'surefoot.rollout.{name}' for name in LIGHT)}\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_using_them_loads_neither_torch_nor_transformers_nor_ray(tmp_path):
    from . import tiny_models

    folder = tiny_models.qwen(tmp_path)
    code = (
        "import sys, asyncio\n"
        "from surefoot.rollout.data import load_rows, load_eval_rows\n"
        "from surefoot.rollout.rewards import resolve_reward, score\n"
        "from surefoot.rollout.tokens import load_tokenizer\n"
        "tokenizer = load_tokenizer(sys.argv[1])\n"
        "task = dict(source='reasoning_gym:chain_sum', tokenizer=tokenizer, max_new_tokens=1)\n"
        "rows = load_rows(size=3, template='{{ prompt }}', max_prompt_tokens=63, **task).rows\n"
        "load_eval_rows(train=rows, size=2, eval_source=None, max_prompt_tokens=63, **task)\n"
        "reward = resolve_reward(None, task['source'])\n"
        "print(asyncio.run(score(reward, rows[0], rows[0].fields['answer'], [], 30)).reward)\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split("\n")[:2] == ["1.0", "[]"]
