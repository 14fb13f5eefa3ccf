"""The tokenizer of a model folder, without transformers; owns nothing but what it read there.

Text becomes the very ids that transformers' AutoTokenizer gives for a folder with a `tokenizer.json`, chat
messages the very prompt that its `apply_chat_template` renders. It is loaded in the light commands and in
workers alike, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import xxhash
from tokenizers import AddedToken

from ..statemachine.errors import ModelRefused
from .templates import Template, TemplateFailed

NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back, the ids that end a response, and the model's chat template. Immutable."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        specials: Mapping[str, str],
        chat_template: str | None,
        stop_ids: Sequence[int],
        pad_id: int | None,
        context_length: int | None,
        digest: str,
    ) -> None:
        self._backend = backend
        self._chat_template = Template(chat_template) if chat_template is not None else None
        self._digest = digest
        self.specials = dict(specials)  # bos_token, eos_token, ...: name -> text
        self.stop_ids = tuple(sorted(set(stop_ids)))  # a sample that draws one of these is finished
        self.pad_id = pad_id if pad_id is not None else (self.stop_ids[0] if self.stop_ids else 0)
        self.context_length = context_length  # tokens, prompt and response together; None: not stated

    @property
    def vocab_size(self) -> int:
        """Ids there are, added tokens included. The model's embedding may hold more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with what the tokenizer itself adds (a begin token, for some models)."""
        # One text at a time: encode_batch starts threads, and would warn a host that forks later.
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Chat messages as the prompt text that asks for the assistant's next one; encode it with
        `add_special_tokens=False`. Raises TemplateFailed, also where the model has no chat template."""
        if self._chat_template is None:
            raise TemplateFailed("the model has no chat template")
        return self._chat_template.render(
            {
                "messages": [_readable_message(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                **self.specials,
            }
        )

    def starts_with_begin_token(self, text: str) -> bool:
        """Whether a template has written the begin token already, so that adding it would double it."""
        begin = self.specials.get("bos_token")
        return bool(begin) and text.startswith(begin)

    def digest(self) -> str:
        """xxh3-128 over all that decides ids, stop ids and chat prompts."""
        return self._digest


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelRefused for a folder that is none or lacks its files."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelRefused(
            f"model.path = {str(model_path)!r} is no folder: it must be a local folder with config.json, "
            "tokenizer.json and safetensors weights",
            path=str(model_path),
        )
    config = _read_json(folder, "config.json", needed=True)
    if not (folder / "tokenizer.json").is_file():
        raise ModelRefused(
            f"model.path = {str(model_path)!r} has no tokenizer.json: save the model's fast tokenizer there "
            "(save_pretrained writes it)",
            path=str(model_path),
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelRefused(
            f"{folder / 'tokenizer.json'} cannot be read ({_one_line(error)}): save the tokenizer again",
            path=str(model_path),
        ) from error
    tokenizer_config = _read_json(folder, "tokenizer_config.json")
    generation_config = _read_json(folder, "generation_config.json")

    specials, extra = _special_tokens(folder, tokenizer_config)
    if backend.padding is not None:
        specials.setdefault("pad_token", _token(backend.padding["pad_token"]))
    _add_missing_tokens(backend, tokenizer_config, specials, extra)
    # A limit saved with the tokenizer is its own user's business: prompts are measured, never cut.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(tokenizer_config.get("split_special_tokens", False))

    texts = {name: token.content for name, token in specials.items()}
    # transformers makes a missing generation config out of the model's config.
    stop_ids = _ids((generation_config or config).get("eos_token_id"))
    if "eos_token" in texts and (end_id := backend.token_to_id(texts["eos_token"])) is not None:
        stop_ids.append(end_id)
    text_config = config.get("text_config") or config
    context_length = text_config.get("max_position_embeddings")
    pad_id = backend.token_to_id(texts["pad_token"]) if "pad_token" in texts else None
    if pad_id is None:
        pad_ids = _ids(generation_config.get("pad_token_id")) or _ids(text_config.get("pad_token_id"))
        pad_id = pad_ids[0] if pad_ids else None
    if pad_id is not None and not 0 <= pad_id < text_config.get("vocab_size", pad_id + 1):
        pad_id = None  # a filler that the model has no embedding for would be an error in every batch
    chat_template = _chat_template(folder, tokenizer_config)

    hashed = xxhash.xxh3_128((folder / "tokenizer.json").read_bytes())
    settings = [
        sorted(texts.items()),
        sorted((index, repr(token)) for index, token in backend.get_added_tokens_decoder().items()),
        sorted(set(stop_ids)),
        chat_template,
        backend.encode_special_tokens,
    ]
    hashed.update(json.dumps(settings, ensure_ascii=True).encode())
    try:
        return Tokenizer(
            backend,
            specials=texts,
            chat_template=chat_template,
            stop_ids=stop_ids,
            pad_id=pad_id,
            context_length=int(context_length) if context_length is not None else None,
            digest=hashed.hexdigest(),
        )
    except TemplateFailed as error:
        raise ModelRefused(
            f"the chat template of model.path = {str(model_path)!r} {error}", path=str(model_path)
        ) from error


def _special_tokens(
    folder: Path, tokenizer_config: dict[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """The named special tokens and the unnamed ones; the old file of their own counts where the config
    does not list its added tokens."""
    stated = dict(tokenizer_config)
    if "added_tokens_decoder" not in tokenizer_config:
        stated.update(_read_json(folder, "special_tokens_map.json"))
    named = {name: _token(stated[name]) for name in NAMED_SPECIALS if stated.get(name) is not None}
    others = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or []
    if isinstance(others, Mapping):
        others = list(others.values())
    others = list(others) + [
        value
        for name, value in stated.items()
        if name.endswith("_token") and name not in NAMED_SPECIALS and isinstance(value, str)
    ]
    return named, [_token(other) for other in others]


def _add_missing_tokens(
    backend: tokenizers.Tokenizer,
    tokenizer_config: dict[str, Any],
    specials: Mapping[str, AddedToken],
    extra: Sequence[AddedToken],
) -> None:
    """Make every token that the config names one that is matched whole, with the flags that it states."""
    there = list(backend.get_added_tokens_decoder().values())
    declared = (tokenizer_config.get("added_tokens_decoder") or {}).items()
    in_order = [_token(stated) for _, stated in sorted(declared, key=lambda item: int(item[0]))]
    same = {repr(token) for token in there}
    missing = [token for token in in_order if repr(token) not in same]
    known = {token.content for token in [*there, *in_order]}
    for token in [*specials.values(), *extra]:
        if token.content not in known:
            known.add(token.content)
            missing.append(token)
    named = {token.content for token in specials.values()}
    for token in missing:
        token.special = token.special or token.content in named
    backend.add_tokens(missing)


def _token(stated: Any) -> AddedToken:
    if isinstance(stated, str):
        return AddedToken(stated, special=True)
    fields = {key: value for key, value in stated.items() if key != "__type"}
    return AddedToken(fields.pop("content"), **{"special": True, **fields})


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The default chat template: a file of its own comes before the tokenizer's config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stated = tokenizer_config.get("chat_template")
    if isinstance(stated, list):
        return {entry["name"]: entry["template"] for entry in stated}.get("default")
    return stated


def _readable_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: keys without a value are absent, reasoning has its usual names."""
    stated = {key: value for key, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in stated:
            return {"thinking": stated[name], **stated, "reasoning_content": stated[name]}
    return stated


def _ids(stated: Any) -> list[int]:
    if stated is None:
        return []
    return [int(one) for one in stated] if isinstance(stated, list) else [int(stated)]


def _read_json(folder: Path, name: str, *, needed: bool = False) -> dict[str, Any]:
    path = folder / name
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not needed:
            return {}
        raise ModelRefused(
            f"model.path = {str(folder)!r} has no {name}: it must be a folder that save_pretrained wrote",
            path=str(folder),
        ) from None
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path} cannot be read: {_one_line(error)}", path=str(folder)) from error
    if not isinstance(read, dict):
        raise ModelRefused(
            f"{path} is no JSON object: it must be as save_pretrained wrote it", path=str(folder)
        )
    return read


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
