"""Small tokenizers of the kinds that model folders hold, and folders around them. No weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "What is 12 + 7? The answer is 19.",
    "Add 3 and 45, please. It's 48!",
    "user system assistant",
    "naïve café — ünïcode 汉字 🙂",
]
CHATML = (
    "{%- if messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}\n"
    "{% for message in messages %}\n"
    "    {% if message.role != 'system' %}\n"
    "{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}"
    "    {% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if loop.index0 > 8 %}{% break %}{% endif %}"
    "{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "[{{ message.role }}]{{ message.content | tojson }}{% generation %}{% endgeneration %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt and tools is none %}[assistant]{% endif %}"
)


def byte_level(specials: list[str], *, begin: str | None = None) -> Tokenizer:
    """As Qwen's and Llama 3's: byte-level BPE; `begin` is put before every text, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=specials,
            show_progress=False,
        ),
    )
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer


def characters() -> Tokenizer:
    """As a small model's: one id per character."""
    alphabet = ["<pad>", "<end>", *"0123456789+-= "]
    tokenizer = Tokenizer(models.WordLevel({one: i for i, one in enumerate(alphabet)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    return tokenizer


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    **other_files: Any,
) -> Path:
    """A model folder without weights. `other_files`: name without ending -> JSON, or text for `.jinja`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config": {"model_type": "llama", "max_position_embeddings": 64} | (config or {}),
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"} | (tokenizer_config or {}),
        "generation_config": generation_config,
        **other_files,
    }
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content)
        elif content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def qwen(folder: Path) -> Path:
    """Two end ids, a pad token that is one of them, ChatML."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return write_model(
        folder,
        tokenizer,
        config={"model_type": "qwen2", "eos_token_id": 2},
        tokenizer_config={
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "bos_token": None,
            "chat_template": CHATML,
        },
        generation_config={"eos_token_id": [2, 0], "pad_token_id": 0},
    )


def llama3(folder: Path) -> Path:
    """A begin token before every text, the chat template in a file of its own, added tokens declared."""
    tokenizer = byte_level(["<|begin|>", "<|end|>", "<|eot|>"], begin="<|begin|>")
    return write_model(
        folder,
        tokenizer,
        tokenizer_config={
            "bos_token": "<|begin|>",
            "eos_token": "<|eot|>",
            "chat_template": "not this one",
            "added_tokens_decoder": {
                "0": {"content": "<|begin|>", "special": True, "normalized": False},
                "330": {"content": "<|tool|>", "special": False, "normalized": False},
            },
        },
        generation_config={"eos_token_id": 1},
        chat_template=LLAMA_CHAT,
    )


def old_style(folder: Path) -> Path:
    """Special tokens that only the old map file names, saved with a length limit and padding."""
    tokenizer = byte_level([])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return write_model(
        folder,
        tokenizer,
        tokenizer_config={"add_bos_token": True, "chat_template": [{"name": "default", "template": CHATML}]},
        special_tokens_map={"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": True}},
    )


def sums(folder: Path) -> Path:
    """A character-level model's folder."""
    return write_model(
        folder,
        characters(),
        tokenizer_config={"eos_token": "<end>", "pad_token": "<pad>"},
        generation_config={"eos_token_id": 1, "pad_token_id": 0},
    )
