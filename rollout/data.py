"""Rows of data: prompts as the model sees them, and the order in which they are drawn.

Owns no state. What is loaded depends on the config, the data and the tokenizer alone, and its digest says
whether a later life of a run has loaded the same. The length after filtering is what the budget counts;
a row that could not be generated from is refused here, before anything starts.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from ..statemachine.errors import ConfigRefused, DataRefused
from .protocols import Row
from .sources import RawRow, Source, is_file, read_source
from .tasks import task_name
from .templates import Template, TemplateFailed
from .tokens import Tokenizer


class LoadedData(msgspec.Struct, frozen=True, kw_only=True):
    """What was really loaded."""

    rows: list[Row]
    filtered: int  # rows that max_prompt_tokens took out
    digest: str  # xxh3-128 over prompts, ids and columns of the rows that are left


def load_rows(
    *,
    source: Source,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    seed: int = 0,
    size: int | None = None,
    options: Mapping[str, Any] | None = None,
    max_prompt_tokens: int | None = None,
    template: str | None = None,
    needs_answer: bool = True,
) -> LoadedData:
    """The training rows. `needs_answer`: the default reward is used, so each row must have an answer.

    Raises DataRefused (naming file and line) and ConfigRefused.
    """
    # A generated task knows its answers, whatever form they have.
    needs_answer = needs_answer and task_name(source) is None
    reader = _RowReader(tokenizer, max_new_tokens, max_prompt_tokens, template, needs_answer)
    rows = list(reader.read(read_source(source, size=size, options=options or {}, seed=seed)))
    if not rows and reader.filtered:
        raise DataRefused(
            f"data.max_prompt_tokens = {max_prompt_tokens} leaves none of {reader.filtered} rows: the "
            f"shortest prompt has {reader.shortest} tokens; raise it to that or more"
        )
    if not rows:
        said = f"data.source = {str(source)!r}" if is_file(source) else "the list of rows"
        raise DataRefused(f"{said} has no rows: there must be at least one; add some, or name other data")
    return LoadedData(rows=rows, filtered=reader.filtered, digest=digest_rows(rows))


def load_eval_rows(
    *,
    train: Sequence[Row],
    source: Source,
    eval_source: str | None,
    tokenizer: Tokenizer,
    max_new_tokens: int,
    size: int,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    max_prompt_tokens: int | None = None,
    template: str | None = None,
    needs_answer: bool = True,
) -> LoadedData:
    """Held-out rows: distinct prompts, none of them a prompt in training.

    From `eval_source`, the first `size` of them or as many as it has; without one, exactly `size` of the
    training task's from another seed. `source` and `options` are the training data's. Raises as `load_rows`.
    """
    if eval_source is None and task_name(source) is None:
        raise ConfigRefused(
            "eval.source is needed: held-out rows can be made only for generated tasks, so name a file of "
            "them, or unset eval.every_updates",
            key="eval.source",
        )
    generated = eval_source is None or task_name(eval_source) is not None
    if generated and eval_source not in (None, source):
        raise ConfigRefused(
            f"eval.source = {eval_source!r}: held-out tasks must be those of data.source, {source!r}: leave "
            "it out, or name a file",
            key="eval.source",
        )
    if generated:
        # Room for the rows that turn out to be in training: small tasks have few prompts.
        raw = read_source(source, size=20 * size + 200, options=options or {}, seed=eval_task_seed(seed))
    else:
        raw = read_source(eval_source or "", size=None, options={}, seed=seed, key="eval.source")
    reader = _RowReader(
        tokenizer, max_new_tokens, max_prompt_tokens, template, needs_answer and not generated
    )
    taken = {row.prompt for row in train}
    rows: list[Row] = []
    for row in reader.read(raw):
        if row.prompt in taken:
            continue
        taken.add(row.prompt)
        rows.append(msgspec.structs.replace(row, row_index=len(rows)))
        if len(rows) == size:
            break
    if generated and len(rows) < size:
        raise ConfigRefused(
            f"eval.size = {size}, but the task gave only {len(rows)} prompts that are not in training: lower "
            "eval.size or data.size, or name a file as eval.source",
            key="eval.size",
        )
    if not rows:
        raise DataRefused(
            f"eval.source = {eval_source!r} has no row that is not in training: name another file"
        )
    return LoadedData(rows=rows, filtered=reader.filtered, digest=digest_rows(rows))


def digest_rows(rows: Iterable[Row]) -> str:
    """xxh3-128 over the rows in order, each as canonical JSON on a line of its own."""
    hashed = xxhash.xxh3_128()
    for row in rows:
        canonical = [row.prompt, row.prompt_ids, row.fields]
        line = json.dumps(canonical, sort_keys=True, separators=(",", ":"), default=lambda value: value.hex())
        hashed.update(line.encode("ascii") + b"\n")
    return hashed.hexdigest()


class DrawOrder:
    """Which row each prompt of the stream is: every epoch a shuffle of all rows, one epoch after another.

    The shuffle sorts rows by a hash of seed, epoch and row, so it is the same under any version of Python and
    any prompt can be asked for; two epochs are remembered, because batches cross their border.
    """

    def __init__(self, data_len: int, epochs: int, seed: int) -> None:
        if data_len < 1 or epochs < 1:
            raise ValueError(f"no prompts to draw from {data_len} rows and {epochs} epochs")
        self.data_len = data_len
        self.epochs = epochs
        self.seed = seed
        self._shuffled: dict[int, array[int]] = {}

    def __len__(self) -> int:
        """Prompts that can be drawn."""
        return self.data_len * self.epochs

    def __call__(self, prompt_index: int) -> int:
        """The row of a prompt. Raises IndexError past the last epoch."""
        if not 0 <= prompt_index < len(self):
            raise IndexError(f"prompt {prompt_index} of {self.epochs} epochs of {self.data_len} rows")
        epoch, place = divmod(prompt_index, self.data_len)
        order = self._shuffled.get(epoch)
        if order is None:
            while len(self._shuffled) >= 2:
                del self._shuffled[next(iter(self._shuffled))]
            order = self._shuffled[epoch] = self._shuffle(epoch)
        return order[place]

    def _shuffle(self, epoch: int) -> array[int]:
        key = _hash63("draw order", self.seed, epoch)
        pack, digest = struct.Struct("<q").pack, xxhash.xxh3_64_intdigest
        return array("q", sorted(range(self.data_len), key=lambda row: digest(pack(row), key)))


def draw_order(data_len: int, epochs: int, seed: int) -> DrawOrder:
    """The draw order of a run; call it with a prompt index."""
    return DrawOrder(data_len, epochs, seed)


def sample_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """The sampling seed of one sample, 63 bits; the same on every attempt."""
    return _hash63("sample", run_seed, prompt_index, sample_index)


def eval_task_seed(run_seed: int) -> int:
    """The seed that held-out rows are generated from. Tasks use consecutive seeds for their rows, so it lies
    anywhere but next to the run's; 31 bits, which every task's own generator takes."""
    return _hash63("held-out rows", run_seed) >> 32


def _hash63(*parts: str | int) -> int:
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1


class _RowReader:
    """Raw rows to rows: prompts rendered, encoded, filtered and checked against the context."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        max_prompt_tokens: int | None,
        template: str | None,
        needs_answer: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._needs_answer = needs_answer
        self.filtered = 0
        self.shortest: int | None = None  # tokens of the shortest prompt that was filtered out
        self._template: Template | None = None
        if template is not None:
            try:
                self._template = Template(template, strict=True)
            except TemplateFailed as error:
                raise ConfigRefused(f"data.template {error}", key="data.template") from error

    def read(self, raw: Iterable[RawRow]) -> Iterable[Row]:
        row_index = 0
        for place, fields in raw:
            prompt = _checked_prompt(place, fields, self._needs_answer)
            text, ids = self._encode(place, fields, prompt)
            if self._max_prompt_tokens is not None and len(ids) > self._max_prompt_tokens:
                self.filtered += 1
                self.shortest = min(len(ids), self.shortest or len(ids))
                continue
            self._check_fits(place, ids)
            yield Row(row_index=row_index, prompt=text, prompt_ids=ids, fields=fields)
            row_index += 1

    def _encode(self, place: str, fields: dict[str, Any], prompt: str | list[Any]) -> tuple[str, list[int]]:
        tokenizer = self._tokenizer
        chat_used = isinstance(prompt, list)

        def chat(messages: str | list[dict[str, Any]]) -> str:
            """In a template: the model's own chat prompt for a user's text, or for messages."""
            nonlocal chat_used
            chat_used = True
            return tokenizer.render_chat(
                [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
            )

        try:
            if self._template is not None:
                names = {"chat": chat, "bos_token": "", "eos_token": "", **tokenizer.specials, **fields}
                text = self._template.render(names)
            elif isinstance(prompt, list):
                text = tokenizer.render_chat(prompt)
            else:
                text = prompt
        except TemplateFailed as error:
            if self._template is None and not tokenizer.has_chat_template:
                raise DataRefused(
                    f"{place}: its prompt is chat messages and the model has no chat template: set "
                    "data.template"
                ) from error
            which = "the model's chat template" if self._template is None else "data.template"
            raise DataRefused(f"{place}: {which} {error}") from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataRefused(
                f"{place}: character {error.start + 1} of its prompt is half of a surrogate pair, and no "
                "text: correct it"
            ) from error
        written = chat_used or tokenizer.starts_with_begin_token(text)
        return text, tokenizer.encode(text, add_special_tokens=not written)

    def _check_fits(self, place: str, ids: list[int]) -> None:
        if not ids:
            raise DataRefused(
                f"{place}: its prompt is empty, and there is nothing to generate from; fill it, or take the "
                "row out"
            )
        context = self._tokenizer.context_length
        if context is not None and len(ids) + self._max_new_tokens > context:
            room = context - self._max_new_tokens
            way_out = f"set data.max_prompt_tokens to at most {room}, or lower" if room > 0 else "lower"
            raise DataRefused(
                f"{place}: its prompt of {len(ids)} tokens and rollout.max_new_tokens = "
                f"{self._max_new_tokens} do not fit the model's context of {context}: {way_out} "
                "rollout.max_new_tokens"
            )


def _checked_prompt(place: str, fields: dict[str, Any], needs_answer: bool) -> str | list[Any]:
    """The row's prompt, a string or chat messages. Raises DataRefused."""
    if "prompt" not in fields:
        has = ", ".join(sorted(fields)) or "nothing"
        raise DataRefused(
            f"{place} has no prompt (it has {has}): every row needs a column of that name; rename the one "
            "that holds the prompt"
        )
    prompt = fields["prompt"]
    if isinstance(prompt, list):
        for message in prompt:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise DataRefused(
                    f"{place}: a chat message must have role and content, both strings, and this one is "
                    f"{_short(message)}"
                )
        if not prompt:
            raise DataRefused(f"{place}: its prompt has no messages; give it one, or take the row out")
    elif not isinstance(prompt, str):
        raise DataRefused(
            f"{place}: its prompt is {_short(prompt)}, not a string and not chat messages; make it one "
            "of the two"
        )
    if needs_answer:
        answer = fields.get("answer")
        if not isinstance(answer, str | int | float) or (isinstance(answer, str) and not answer.strip()):
            said = f"the answer {_short(answer)}" if "answer" in fields else "no answer"
            raise DataRefused(
                f"{place} has {said}, and the default reward needs a string or a number: put it right, or "
                "set reward.function"
            )
    return prompt


def _short(value: Any) -> str:
    said = " ".join(repr(value).split())
    return said if len(said) <= 60 else said[:57] + "..."
