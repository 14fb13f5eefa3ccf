"""A config is read in full, refused in one line, and compared key by key."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from surefoot.statemachine.errors import ConfigChanged, ConfigRefused
from surefoot.trainer.config import changed, load_config, option_fields, refuse_changes
from surefoot.trainer.config_docs import document
from surefoot.trainer.options import Config
from surefoot.trainer.wording import expected

ROOT = Path(__file__).parents[2]

BASE: dict[str, Any] = {
    "data": {"source": "reasoning_gym:chain_sum", "size": 10},
    "model": {"path": "model"},
}

_KEYS = """
seed
data.source data.size data.options data.epochs data.max_prompts data.max_prompt_tokens data.template
reward.function reward.timeout_seconds
model.path
batch.prompts batch.group_size batch.minibatches batch.passes batch.tail
rollout.workers rollout.max_concurrent rollout.max_new_tokens rollout.temperature rollout.deterministic
rollout.max_attempts rollout.gpus_per_worker rollout.threads
learner.ranks learner.gpus_per_rank learner.micro_batch_tokens learner.compute_dtype
learner.activation_checkpointing learner.threads
algorithm.scale algorithm.clip_low algorithm.clip_high algorithm.mask_truncated algorithm.drop_no_spread
optim.lr optim.betas optim.eps optim.weight_decay optim.max_grad_norm optim.max_optimizer_steps
optim.schedule.kind optim.schedule.warmup_steps optim.schedule.warmup_ratio optim.schedule.min_ratio
optim.schedule.horizon
sync.every_updates sync.max_staleness sync.on_stale
checkpoint.every_updates checkpoint.keep
groups.keep
eval.every_updates eval.size eval.source eval.temperature
metrics.jsonl metrics.tensorboard
cluster.address cluster.slots cluster.start_seconds cluster.reply_seconds
preempt.grace_seconds
storage.url
"""
OPTIONS = _KEYS.split()


def refusal(source: Any, *sets: str) -> str:
    with pytest.raises(ConfigRefused) as caught:
        load_config(source, list(sets))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text('data.source = "reasoning_gym:chain_sum"\ndata.size = 10\nmodel.path = "model"\n' + text)
    return path


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigRefused, match="the config is a int: give the path of a TOML file, or a dict"):
        load_config(7)  # type: ignore[arg-type]


def test_the_list_of_options_grows_only_by_a_deliberate_change() -> None:
    assert [key for key, _, _ in option_fields()] == OPTIONS


def test_every_option_is_documented() -> None:
    for key, field, section in option_fields():
        assert field.description and field.description.rstrip().endswith("."), key
        assert section.__doc__, key


def test_the_committed_page_is_what_the_options_make() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == document()


def test_defaults_are_standard_grpo() -> None:
    config = load_config(BASE)
    assert (config.algorithm.scale, config.algorithm.clip_low, config.algorithm.clip_high) == (
        "group",
        0.2,
        0.2,
    )
    assert config.algorithm.drop_no_spread is False and config.algorithm.mask_truncated is False
    assert config.sync.on_stale == "wait" and config.batch.tail == "drop"
    assert config.learner.compute_dtype == "float32"


def test_resolved_holds_every_key_as_json_and_reads_back_the_same() -> None:
    config = load_config(BASE, ["optim.schedule.warmup_ratio=0.07", "data.options.max_terms=2"])
    resolved = json.loads(json.dumps(config.resolved()))
    assert resolved["optim"]["schedule"]["warmup_ratio"] == "0.07"
    assert Config.from_resolved(resolved) == config
    for key in OPTIONS:
        value: Any = resolved
        for step in key.split("."):
            assert step in value, key
            value = value[step]


@pytest.mark.parametrize("written", ["0.07", "0.29", "0.1", "1e-3"])
def test_a_warmup_ratio_stays_the_decimal_that_was_written(tmp_path: Path, written: str) -> None:
    from_file = load_config(write(tmp_path, f"optim.schedule.warmup_ratio = {written}\n"))
    from_set = load_config(BASE, [f"optim.schedule.warmup_ratio={written}"])
    from_float = load_config({**BASE, "optim": {"schedule": {"warmup_ratio": float(written)}}})
    for config in (from_file, from_set, from_float):
        assert config.optim.schedule.warmup_ratio == Decimal(written)


def test_other_floats_are_floats_and_whole_numbers_count_as_such(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "optim.lr = 1e-5\nrollout.temperature = 1\ndata.options.share = 0.5\n")
    )
    assert config.optim.lr == 1e-5 and type(config.optim.lr) is float
    assert type(config.rollout.temperature) is float
    assert type(config.data.options["share"]) is float


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("learner.lr", "optim.lr"),
        ("optimizer.lr", "optim.lr"),
        ("batch.promts", "batch.prompts"),
        ("batch.size", "batch.group_size"),
        ("warmup_steps", "optim.schedule.warmup_steps"),
        ("optim.warmup_ratio", "optim.schedule.warmup_ratio"),
        ("rollout.max_tokens", "rollout.max_new_tokens"),
        ("data.epoch", "data.epochs"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(tmp_path: Path, wrong: str, right: str) -> None:
    for message in (refusal(BASE, f"{wrong}=1"), refusal(write(tmp_path, f"{wrong} = 1\n"))):
        assert message.startswith(f"{wrong} is no key") and message.endswith(f"nearest is {right}")


@pytest.mark.parametrize("key", ["zzzz.qqq", "zq", "data.xyzzy", "optim.schedule.flavour"])
def test_a_key_far_from_every_right_one_is_refused_without_a_guess(tmp_path: Path, key: str) -> None:
    for message in (refusal(BASE, f"{key}=1"), refusal(write(tmp_path, f"{key} = 1\n"))):
        assert (
            message == f"{key} is no key of the config; take it out, or find the right one in docs/config.md"
        )
    assert (ROOT / "docs" / "config.md").exists()


@pytest.mark.parametrize("key", ["", ".", "a..b", "data.", ".seed"])
def test_a_key_without_a_name_in_each_of_its_places_is_refused_as_such(key: str) -> None:
    assert refusal(BASE, f"{key}=3") == f"--set {key}=3: must be key=value, as in --set optim.lr=1e-5"


def test_a_table_of_the_file_that_is_a_value_is_refused(tmp_path: Path) -> None:
    said = refusal(write(tmp_path, "optim = 3\n"))
    assert said == "optim = 3: optim is a table; write [optim] and its keys below it"


def test_a_nameless_key_of_a_file_is_refused_by_its_quotes(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, '"" = 3\n')).startswith("'' is no key of the config")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optim.lr=fast", "optim.lr = 'fast': must be a number greater than 0; the default is 1e-06"),
        ("optim.lr=", "optim.lr = '': must be a number greater than 0; the default is 1e-06"),
        ("optim.lr=inf", "optim.lr = inf: must be a number greater than 0, and finite; the default is 1e-06"),
        (
            "batch.prompts=1.5",
            "batch.prompts = 1.5: must be an integer greater than or equal to 1; the default is 32",
        ),
        (
            "optim.betas=[0.9]",
            "optim.betas = [0.9]: has too few values, must be a list of 2, each a number greater than or "
            "equal to 0 and less than 1; the default is [0.9, 0.999]",
        ),
        (
            'optim.betas=[0.9, "x"]',
            "optim.betas = 'x': must be a number greater than or equal to 0 and less than 1; the default is "
            "[0.9, 0.999]",
        ),
        (
            "rollout.deterministic=maybe",
            "rollout.deterministic = 'maybe': must be true or false; the default is false",
        ),
        (
            "metrics.tensorboard=",
            "metrics.tensorboard = '': must be true or false; give another value, or leave it out",
        ),
        ("data.options=3", "data.options = 3: must be a table; the default is {}"),
        ("data.options.share=nan", "data.options = nan: must be finite; the default is {}"),
        ("model.path=", "model.path = '': must not be empty; give another value"),
        ("data.template=", "data.template = '': must not be empty; give another value, or leave it out"),
        ("cluster.address=", "cluster.address = '': must not be empty; give another value, or leave it out"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_what_is_expected_and_the_way_out(setting: str, said: str) -> None:
    assert refusal(BASE, setting) == said


def test_every_option_can_say_what_it_expects() -> None:
    for key, field, _ in option_fields():
        assert expected(field).startswith(("a ", "an ", "true", "one of")), key


def test_a_number_too_long_to_read_is_refused_as_a_value() -> None:
    assert refusal(BASE, f"seed={'9' * 5000}").startswith("seed = '999")


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("optim.lr=-1", "greater than 0"),
        ("optim.lr=nan", "finite"),
        ("optim.lr=fast", "number"),
        ("optim.betas=[0.9]", "too few values"),
        ("optim.betas=[0.9,1.0]", "less than 1"),
        ("data.epochs=0", "greater than or equal to 1"),
        ("data.epochs=true", "integer"),
        ("batch.prompts=2.0", "integer"),
        ("batch.group_size=1", "greater than or equal to 2"),
        ("batch.tail=keep", "'drop' or 'train'"),
        ("rollout.temperature=0", "greater than 0"),
        ("optim.schedule.warmup_ratio=1.5", "at most 1"),
        ("optim.schedule.warmup_ratio=nan", "finite"),
        ("reward.function=score", "package.module:function"),
        ("seed=-1", "greater than or equal to 0"),
    ],
)
def test_a_wrong_type_or_range_is_refused_by_key_value_and_rule(setting: str, rule: str) -> None:
    key, _, value = setting.partition("=")
    message = refusal(BASE, setting)
    assert message.startswith(f"{key} = ") and rule in message and ";" in message
    assert value.strip("[]").split(",")[-1].rstrip("0").rstrip(".") in message.lower()


def test_a_missing_key_is_named() -> None:
    assert refusal({"data": BASE["data"]}).startswith("model.path is not set")
    assert refusal({"model": BASE["model"], "data": {}}).startswith("data.source is not set")


@pytest.mark.parametrize(
    "key", ["rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.repetition_penalty", "top_p"]
)
def test_sampling_from_less_than_the_full_distribution_is_refused_with_the_reason(key: str) -> None:
    message = refusal(BASE, f"{key}=0.9")
    assert message.startswith(f"{key} = 0.9") and "log-probabilities" in message


def test_two_exclusive_keys_in_the_file_are_refused(tmp_path: Path) -> None:
    text = "optim.schedule.warmup_steps = 5\noptim.schedule.warmup_ratio = 0.1\n"
    message = refusal(write(tmp_path, text))
    assert "warmup_steps = 5" in message and "warmup_ratio = 0.1" in message


def test_set_on_one_of_two_exclusive_keys_takes_the_others_place(tmp_path: Path) -> None:
    path = write(tmp_path, "optim.schedule.warmup_steps = 5\n")
    schedule = load_config(path, ["optim.schedule.warmup_ratio=0.1"]).optim.schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, Decimal("0.1"))
    schedule = load_config(load_config(path), ["optim.schedule.warmup_ratio=0.1"]).optim.schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, Decimal("0.1"))
    assert "only one" in refusal(path, "optim.schedule.warmup_ratio=0.1", "optim.schedule.warmup_steps=3")


def test_set_takes_toml_values_bare_strings_and_none() -> None:
    config = load_config(
        BASE,
        [
            "optim.betas=[0.8, 0.9]",
            "batch.tail=train",
            'data.template="{{ prompt }}="',
            "data.options.nested.max=3",
            "data.max_prompts=7",
            "data.max_prompts=none",
        ],
    )
    assert config.optim.betas == (0.8, 0.9) and config.batch.tail == "train"
    assert config.data.template == "{{ prompt }}=" and config.data.options == {"nested": {"max": 3}}
    assert config.data.max_prompts is None
    assert refusal(BASE, "optim.lr").startswith("--set optim.lr: must be key=value")


@pytest.mark.parametrize("said", ["optim={}", "optim={lr=1e-5}", "optim=3", "optim.schedule={}"])
def test_a_whole_table_is_not_set_at_once_as_its_other_keys_would_be_forgotten(said: str) -> None:
    key = said.partition("=")[0]
    assert refusal(BASE, said).startswith(f"--set {said}: {key} is a table; set its keys one by one")


def test_a_path_in_the_file_is_taken_from_its_folder_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, current = tmp_path / "configs", tmp_path / "current"
    (beside / "model").mkdir(parents=True)
    current.mkdir()
    path = write(beside, "eval.source = 'held.jsonl'\neval.every_updates = 1\n")
    monkeypatch.chdir(current)
    config = load_config(path)
    assert config.model.path == str(beside / "model")
    assert config.eval.source == str(current / "held.jsonl")
    assert config.data.source == "reasoning_gym:chain_sum"
    assert load_config(path, ["model.path=model"]).model.path == str(current / "model")


def test_how_a_path_was_written_is_no_part_of_what_a_config_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative, absolute = load_config(BASE), load_config(BASE, [f"model.path={tmp_path}/model"])
    assert relative == absolute and relative.resolved() == absolute.resolved()
    assert relative.written("model.path") != absolute.written("model.path")
    assert relative != load_config(BASE, ["seed=1"])


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.toml")
    assert refusal(tmp_path) == f"config {tmp_path}: is a folder; name a TOML file"
    assert "line 4" in refusal(write(tmp_path, "batch.prompts = = 3\n"))


def test_keys_of_generated_tasks_are_refused_for_files_and_needed_otherwise() -> None:
    assert refusal(BASE, "data.source=rows.jsonl").startswith("data.size = 10: is for generated tasks only")
    assert refusal(BASE, "data.size=none").startswith("data.size is not set")
    other = (
        "data.source = 'other:task': must be 'reasoning_gym:TASK', or the path of a .jsonl or .parquet file"
    )
    assert refusal(BASE, "data.source=other:task") == other
    rows = {"data": {"source": "rows.jsonl"}, "model": BASE["model"]}
    assert "eval.source" in refusal(rows, "eval.every_updates=2")
    assert load_config({"model": BASE["model"]}, rows="mine").data.source == "object:mine"


def test_what_fixes_accounting_or_numbers_may_not_change_and_the_rest_may() -> None:
    old = load_config(BASE).resolved()
    sets = ["batch.prompts=16", "rollout.workers=3", "checkpoint.keep=5", "seed=1", "eval.size=4"]
    forbidden, allowed = changed(old, load_config(BASE, sets).resolved())
    assert forbidden == {"seed": (0, 1), "batch.prompts": (32, 16), "eval.size": (128, 4)}
    assert allowed == {"rollout.workers": (1, 3), "checkpoint.keep": (2, 5)}
    assert changed(old, load_config(BASE).resolved()) == ({}, {})


def test_the_keys_that_may_change_are_these() -> None:
    from surefoot.trainer.options import may_change

    allowed = {key for key in OPTIONS if may_change(key, deterministic=False)}
    assert allowed == {
        "rollout.workers",
        "rollout.max_concurrent",
        "rollout.max_attempts",
        "rollout.gpus_per_worker",
        "rollout.threads",
        "learner.ranks",
        "learner.gpus_per_rank",
        "learner.micro_batch_tokens",
        "learner.threads",
        "reward.timeout_seconds",
        "checkpoint.every_updates",
        "checkpoint.keep",
        "metrics.jsonl",
        "metrics.tensorboard",
        "cluster.address",
        "cluster.slots",
        "cluster.start_seconds",
        "cluster.reply_seconds",
        "preempt.grace_seconds",
    }


def test_a_deterministic_run_keeps_the_shape_that_it_decodes_at() -> None:
    base = {**BASE, "rollout": {"deterministic": True}}
    new = load_config(base, ["rollout.max_concurrent=8", "rollout.workers=2"]).resolved()
    forbidden, allowed = changed(load_config(base).resolved(), new)
    assert set(forbidden) == {"rollout.max_concurrent"} and set(allowed) == {"rollout.workers"}


def test_a_key_that_an_older_log_lacks_counts_as_its_default() -> None:
    old = load_config(BASE).resolved()
    del old["algorithm"]["mask_truncated"]
    assert changed(old, load_config(BASE).resolved()) == ({}, {})
    forbidden, _ = changed(old, load_config(BASE, ["algorithm.mask_truncated=true"]).resolved())
    assert forbidden == {"algorithm.mask_truncated": (False, True)}


def test_a_changed_config_is_refused_with_both_values() -> None:
    """Report 24."""
    with pytest.raises(ConfigChanged) as caught:
        refuse_changes("a", {"batch.prompts": (32, 16), "seed": (0, 1)})
    message = str(caught.value)
    assert "batch.prompts = 16" in message and "32" in message and "seed" in message and "\n" not in message
    refuse_changes("a", {})
