"""Tokens: the ids and prompts that transformers gives, without transformers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.rollout.templates import TEMPLATE_DATE, Template, TemplateFailed
from surefoot.rollout.tokens import load_tokenizer
from surefoot.statemachine.errors import ModelRefused

from . import tiny_models

FOLDERS = {
    one.__name__: one
    for one in (tiny_models.qwen, tiny_models.llama3, tiny_models.old_style, tiny_models.sums)
}
TEXTS = [
    "What is 12 + 7?",
    "",
    " leading and trailing ",
    "naïve café — 汉字 🙂\n\n\ttabs",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|begin|>twice<|eot|> <|tool|> <s>old</s> style  </s> [PAD]",
    "12+34=",
    "e\u0301",  # not composed
]
CHATS = [
    [{"role": "user", "content": "What is 1+1?"}],
    [
        {"role": "user", "content": ' "quoted" & <b> é '},
        {"role": "assistant", "content": "2", "name": None, "reasoning": "1 and 1"},
        {"role": "user", "content": "And 2+2?"},
    ],
]


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request, tmp_path_factory):
    """The same folder as both libraries see it."""
    from transformers import AutoTokenizer

    folder = FOLDERS[request.param](tmp_path_factory.mktemp(request.param))
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_becomes_the_ids_that_transformers_gives(pair, text):
    ours, theirs = pair
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("text", TEXTS)
def test_ids_become_the_text_that_transformers_gives(pair, text):
    ours, theirs = pair
    ids = theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_becomes_the_ids_that_transformers_gives(pair, text):
    ours, theirs = pair
    assert ours.encode(text) == theirs(text).input_ids


@pytest.mark.parametrize("chat", CHATS)
def test_chats_become_the_prompt_that_transformers_renders(pair, chat):
    ours, theirs = pair
    if theirs.chat_template is None:
        assert not ours.has_chat_template
        with pytest.raises(TemplateFailed, match="no chat template"):
            ours.render_chat(chat)
        return
    text = ours.render_chat(chat)
    assert text == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


def test_the_vocabulary_has_the_size_that_transformers_counts(pair):
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)


def test_an_end_list_stops_on_either_and_the_tokenizers_own_end_token_too(tmp_path):
    folder = tiny_models.qwen(tmp_path)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop_ids == (0, 2)  # <|endoftext|>, <|im_end|>
    assert tokenizer.pad_id == 0
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(folder).stop_ids == (1, 2)


def test_without_a_generation_config_the_models_config_says_what_ends(tmp_path):
    folder = tiny_models.qwen(tmp_path)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": [0, 1]}')
    assert load_tokenizer(folder).stop_ids == (0, 1, 2)


def test_a_model_without_a_pad_token_still_has_a_filler(tmp_path):
    tokenizer = load_tokenizer(tiny_models.llama3(tmp_path))
    assert tokenizer.stop_ids == (1, 2)
    assert tokenizer.pad_id == 1


def test_a_pad_token_that_the_model_has_no_embedding_for_is_not_the_filler(tmp_path):
    folder = tiny_models.qwen(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": "<|new|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"vocab_size": 320}')
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|new|>") == [320]
    assert tokenizer.pad_id == 0


def test_the_context_length_is_the_models_or_not_stated(tmp_path):
    folder = tiny_models.sums(tmp_path)
    assert load_tokenizer(folder).context_length == 64
    (folder / "config.json").write_text('{"text_config": {"max_position_embeddings": 7}}')
    assert load_tokenizer(folder).context_length == 7
    (folder / "config.json").write_text("{}")
    assert load_tokenizer(folder).context_length is None


def test_the_begin_token_that_a_template_wrote_is_seen(tmp_path):
    tokenizer = load_tokenizer(tiny_models.llama3(tmp_path / "llama"))
    assert tokenizer.starts_with_begin_token("<|begin|>[user]")
    assert not tokenizer.starts_with_begin_token("user <|begin|>")
    assert not load_tokenizer(tiny_models.sums(tmp_path / "sums")).starts_with_begin_token("")


def test_the_digest_changes_with_what_changes_ids_and_prompts_and_with_nothing_else(tmp_path):
    folder = tiny_models.qwen(tmp_path)
    first = load_tokenizer(folder).digest()
    assert len(first) == 32
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=4) + "\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2], "transformers_version": "9"}')
    assert load_tokenizer(folder).digest() == first

    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    other_ends = load_tokenizer(folder).digest()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "x"}))
    other_template = load_tokenizer(folder).digest()
    tiny_models.byte_level(["<|im_end|>"]).save(str(folder / "tokenizer.json"))
    assert len({first, other_ends, other_template, load_tokenizer(folder).digest()}) == 4


def refusal(folder) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    assert "model.path = '/no/such' is no folder" in refusal("/no/such")
    (tmp_path / "file").write_text("")
    assert "is no folder" in refusal(tmp_path / "file")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tmp_path, name):
    folder = tiny_models.sums(tmp_path)
    (folder / name).unlink()
    assert f"has no {name}" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize("content", ['{"a"', "[1]"])
def test_a_broken_file_is_refused_by_its_name(tmp_path, name, content):
    folder = tiny_models.sums(tmp_path)
    (folder / name).write_text(content)
    assert name in refusal(folder)


def test_a_chat_template_that_does_not_compile_is_refused(tmp_path):
    folder = tiny_models.sums(tmp_path)
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert "is no jinja2 template" in refusal(folder)


def test_a_template_that_raises_says_what_it_says(tmp_path):
    tokenizer = load_tokenizer(tiny_models.llama3(tmp_path))
    with pytest.raises(TemplateFailed, match="cannot be rendered: no role tool"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])


def test_the_clock_of_a_template_stands_still():
    # Or a run that goes on tomorrow would find that its data has changed.
    assert Template("{{ strftime_now('%d %b %Y') }}").render({}) == "26 Jul 2024"
    assert TEMPLATE_DATE.year == 2024


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(99999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source):
    with pytest.raises(TemplateFailed):
        Template(source, strict=True).render({"messages": []})


def test_a_strict_template_refuses_a_name_that_is_not_there_and_keeps_its_last_newline():
    with pytest.raises(TemplateFailed, match="'question' is undefined"):
        Template("{{ question }}", strict=True).render({"prompt": "x"})
    assert Template("{{ prompt }}\n", strict=True).render({"prompt": "x"}) == "x\n"
