"""What can be refused before a run starts is refused then; the plan is the run's own budget."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from surefoot.statemachine.errors import (
    BudgetRefused,
    ConfigChanged,
    ConfigRefused,
    DataRefused,
    ModelRefused,
    UserMistake,
)
from surefoot.statemachine.events import IncarnationBegan, RunCreated, TakeReason
from surefoot.statemachine.fold_lives import with_changes
from surefoot.trainer.config import Config, load_config
from surefoot.trainer.plan import (
    RATES_SHOWN,
    Prepared,
    config_changes,
    digest_changes,
    first_event,
    plan_dict,
    plan_lines,
    prepare,
    shown_steps,
)
from surefoot.trainer.slots import local_slots

from .models import write_model, write_rows


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    return {
        "data": {"source": str(write_rows(tmp_path / "rows.jsonl", 10)), "epochs": 3},
        "model": {"path": str(write_model(tmp_path / "model"))},
        "batch": {"prompts": 4},
        "rollout": {"max_new_tokens": 8},
        "sync": {"every_updates": 4},
        "optim": {"lr": 1.0},
    }


def planned(base: dict[str, Any], *sets: str) -> Prepared:
    return prepare(load_config(base, sets))


def refusal(kind: type[UserMistake], base: dict[str, Any], *sets: str) -> str:
    with pytest.raises(kind) as caught:
        planned(base, *sets)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def created(prepared: Prepared) -> RunCreated:
    return RunCreated(
        config=prepared.config.resolved(),
        digests=prepared.digests,
        data_len=len(prepared.data.rows),
        rows_filtered=0,
        objects=prepared.objects,
        software={},
    )


def test_the_total_is_known_before_anything_is_built(base: dict[str, Any]) -> None:
    # 10 rows, 3 epochs, 4 prompts an update: 7 optimizer steps, cosine from 1
    plan = plan_dict(planned(base))
    assert plan["optimizer_steps_total"] == plan["horizon"] == 7
    rates = [round(rate, 4) for rate in plan["learning_rates"]]
    assert rates == [1.0, 0.9505, 0.8117, 0.6113, 0.3887, 0.1883, 0.0495]
    assert (plan["data_len"], plan["prompts_available"], plan["publications_total"]) == (10, 30, 2)


def test_a_warmup_ratio_is_exact_from_the_file_to_the_budget(base: dict[str, Any]) -> None:
    sets = ["data.epochs=40", "optim.max_optimizer_steps=100"]
    for ratio, steps in (("0.29", 29), ("0.07", 7)):
        plan = plan_dict(planned(base, *sets, f"optim.schedule.warmup_ratio={ratio}"))
        assert (plan["horizon"], plan["warmup_steps"]) == (100, steps)


COSINE = [1.0, 0.9505, 0.8117, 0.6113, 0.3887, 0.1883, 0.0495]
"""(1 + cos(pi k / 7)) / 2: the multipliers of `base`, which is 30 prompts in 7 updates of 4."""


@pytest.mark.parametrize(
    ("set_one", "expected"),
    [
        # 20 prompts: 5 updates; all used
        ("data.epochs=2", {"prompts_available": 20, "updates_total": 5, "prompts_unused": 0}),
        # 17 of 30: 4 updates hold 16
        ("data.max_prompts=17", {"prompts_total": 17, "updates_total": 4, "prompts_unused": 1}),
        # 30 = 4 * 7 + 2
        ("batch.prompts=7", {"batch_prompts": 7, "optimizer_steps_total": 4, "prompts_unused": 2}),
        ("batch.minibatches=2", {"minibatches": 2, "passes": 1, "optimizer_steps_total": 14}),
        ("batch.passes=3", {"minibatches": 1, "passes": 3, "optimizer_steps_total": 21}),
        # 30 = 7 * 4 + 2: an eighth batch of 2
        ("batch.tail=train", {"updates_total": 8, "optimizer_steps_total": 8, "prompts_unused": 0}),
        ("optim.max_optimizer_steps=5", {"optimizer_steps_total": 5, "horizon": 5, "prompts_unused": 10}),
        ("optim.lr=0.5", {"learning_rates": [rate / 2 for rate in COSINE]}),
        ("optim.schedule.kind=linear", {"learning_rates": [(7 - k) / 7 for k in range(7)]}),
        ("optim.schedule.kind=constant", {"learning_rates": [1.0] * 7}),
        ("optim.schedule.min_ratio=0.2", {"learning_rates": [0.2 + 0.8 * rate for rate in COSINE]}),
        # the first half of a decay over 14: (1 + cos(pi k / 14)) / 2
        (
            "optim.schedule.horizon=14",
            {
                "horizon": 14,
                "optimizer_steps_total": 7,
                "learning_rates": [(1 + math.cos(math.pi * k / 14)) / 2 for k in range(7)],
            },
        ),
        # then a decay over the 5 that are left
        (
            "optim.schedule.warmup_steps=2",
            {"warmup_steps": 2, "learning_rates": [0.5, 1.0, 1.0, 0.9045, 0.6545, 0.3455, 0.0955]},
        ),
        # 0.3 * 7 = 2.1, rounded up; then a decay over 4
        (
            "optim.schedule.warmup_ratio=0.3",
            {"warmup_steps": 3, "learning_rates": [1 / 3, 2 / 3, 1.0, 1.0, 0.8536, 0.5, 0.1464]},
        ),
        # after updates 3, 6 and 7
        ("sync.every_updates=3", {"every_updates": 3, "publications_total": 3}),
    ],
)
def test_every_key_of_the_budget_reaches_it(
    base: dict[str, Any], set_one: str, expected: dict[str, Any]
) -> None:
    before, plan = plan_dict(planned(base)), plan_dict(planned(base, set_one))
    assert before["learning_rates"] == pytest.approx(COSINE, abs=5e-5)
    for key, value in expected.items():
        rates = key == "learning_rates"
        assert plan[key] == (pytest.approx(value, abs=5e-5) if rates else value), key
    assert any(plan[key] != before[key] for key in expected)


@pytest.mark.parametrize("alone", [True, False], ids=["one-epoch", "with-warm-up"])
@pytest.mark.parametrize(
    "set_one",
    ["learner.micro_batch_tokens=12", "learner.ranks=2", "batch.group_size=6"],
)
def test_what_is_computed_at_a_time_and_sampled_per_prompt_enters_no_total(
    base: dict[str, Any], set_one: str, alone: bool
) -> None:
    """Reports 5 and 10: micro-batches, ranks and completions are none of the budget's units."""
    sets = ["data.epochs=1"] if alone else ["batch.minibatches=2", "optim.schedule.warmup_ratio=0.1"]
    plan = plan_dict(planned(base, *sets))
    assert plan_dict(planned(base, *sets, set_one)) == plan
    # 10 // 4 updates; or 7 of 2 minibatches, of whose 14 a tenth is 1.4, rounded up
    assert (plan["optimizer_steps_total"], plan["warmup_steps"]) == ((2, 0) if alone else (14, 2))


def test_the_plan_as_text_has_the_derivation_line_by_line(base: dict[str, Any]) -> None:
    prepared = planned(base)
    lines = list(plan_lines(prepared))
    for line in prepared.budget.derivation:
        assert line in lines
    assert [line for line in lines if line.startswith("  optimizer step")][-1].split()[-1] == "4.951557e-02"


def test_the_plan_says_from_which_number_optimizer_steps_are_counted(base: dict[str, Any]) -> None:
    (heading,) = [line for line in plan_lines(planned(base)) if line.startswith("learning rate")]
    assert heading == (
        "learning rate: 1, cosine, over optimizer steps 0 to 6, counted from 0 (train's display counts those "
        "that are done)"
    )


def test_of_many_learning_rates_the_text_shows_some_with_peak_and_ends() -> None:
    assert shown_steps(RATES_SHOWN, 0) == list(range(RATES_SHOWN))
    shown = shown_steps(10_000, 137)
    assert len(shown) <= RATES_SHOWN + 1 and {0, 137, 9_999} <= set(shown)


def test_fewer_held_out_rows_than_asked_for_are_said(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "a new one", "answer": "1"}\n')
    (warning,) = planned(
        base, "eval.every_updates=1", f"eval.source={tmp_path / 'held.jsonl'}", "eval.size=9"
    ).warnings
    assert "eval.size = 9" in warning and "has 1 rows" in warning


def test_a_plan_of_a_great_many_optimizer_steps_takes_no_longer(base: dict[str, Any]) -> None:
    """Rates that are not shown are not made: a hundred million of them take minutes."""
    prepared = planned(base, "data.epochs=60000000")
    assert prepared.budget.optimizer_steps_total > 10**8
    lines = list(plan_lines(prepared))
    assert sum(line.startswith("  optimizer step ") for line in lines) <= RATES_SHOWN + 1


def test_a_config_without_one_optimizer_step_is_refused(base: dict[str, Any]) -> None:
    message = refusal(BudgetRefused, base, "batch.prompts=31")
    assert "30" in message and "31" in message


def test_bad_data_is_refused_with_its_line(base: dict[str, Any]) -> None:
    path = Path(base["data"]["source"])
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    assert "line 2" in refusal(DataRefused, base)
    path.write_text("")
    refusal(DataRefused, base)
    path.unlink()
    refusal(DataRefused, base)


def test_a_path_that_leads_nowhere_is_named_as_written_and_as_looked_for(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, current = tmp_path / "configs", tmp_path / "current"
    beside.mkdir()
    current.mkdir()
    monkeypatch.chdir(current)
    file = beside / "run.toml"
    file.write_text(f"data.source = 'sums.jsonl'\nmodel.path = '{base['model']['path']}'\n")
    neither = (
        f"data.source = 'sums.jsonl': there is neither {beside}/sums.jsonl (the config's folder) nor "
        f"{current}/sums.jsonl (the current folder); put it there, or name another file"
    )

    def said(kind: type[UserMistake], config: Config) -> str:
        with pytest.raises(kind) as caught:
            prepare(config)
        return str(caught.value)

    assert said(DataRefused, load_config(file)) == neither
    assert said(DataRefused, load_config(load_config(file))) == neither  # as the library loads it once more
    here = f"there is no {current}/sums.jsonl (the current folder); put it there, or name another file"
    assert said(DataRefused, load_config(file, ["data.source=sums.jsonl"])).endswith(here)
    monkeypatch.chdir(beside)
    assert said(DataRefused, load_config(file)).endswith(here.replace(str(current), str(beside)))
    elsewhere = "eval.source = '/nowhere/held.jsonl': there is no /nowhere/held.jsonl; put it there, or name"
    assert refusal(DataRefused, base, "eval.every_updates=1", "eval.source=/nowhere/held.jsonl").startswith(
        elsewhere
    )
    assert planned(base, "eval.source=/nowhere/held.jsonl")  # which nobody reads
    assert refusal(ModelRefused, base, "model.path=some/model") == (
        f"model.path = 'some/model': there is no {beside}/some/model (the current folder); put it there, or "
        "name a folder written by save_pretrained"
    )


def test_a_path_out_of_a_log_is_named_as_the_log_has_it(base: dict[str, Any]) -> None:
    Path(base["data"]["source"]).unlink()
    resolved = Config.from_resolved(load_config(base).resolved())
    with pytest.raises(DataRefused, match=f"there is no {base['data']['source']};"):
        prepare(resolved)


def test_a_folder_that_is_no_model_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(ModelRefused, base, f"model.path={tmp_path}")
    assert "gpt2" in refusal(
        ModelRefused, base, f"model.path={write_model(tmp_path / 'other', model_type='gpt2')}"
    )
    lacking = write_model(tmp_path / "lacking")
    (lacking / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(ModelRefused, base, f"model.path={lacking}")
    small = write_model(tmp_path / "small", vocab_size=10)
    assert "97" in refusal(ModelRefused, base, f"model.path={small}")


def test_weights_that_were_cut_short_are_refused_before_anything_starts(
    base: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model" / "model.safetensors"
    whole = path.read_bytes()
    for torn in (whole[:-1], whole + b"x", whole[:20], b"", b"no weights at all"):
        path.write_bytes(torn)
        message = refusal(ModelRefused, base)
        assert str(path) in message and message.endswith("it is torn; copy the model again"), torn
    path.write_bytes(whole[:-1])
    assert f"is {len(whole) - 1} bytes long where its header says {len(whole)}" in refusal(ModelRefused, base)
    path.write_bytes(whole)
    assert planned(base)


def test_storage_that_nothing_here_opens_is_refused_before_anything_starts(
    base: dict[str, Any], tmp_path: Path
) -> None:
    assert refusal(ConfigRefused, base, "storage.url=nope://bucket").startswith(
        "storage.url = 'nope://bucket': Protocol not known: nope; name a folder"
    )
    for url in (str(tmp_path), "memory://bucket", f"simplecache::file://{tmp_path}"):
        assert planned(base, f"storage.url={url}")


def test_a_prompt_that_does_not_fit_the_context_is_refused(base: dict[str, Any]) -> None:
    message = refusal(DataRefused, base, "rollout.max_new_tokens=125")
    assert "125" in message and "128" in message


def test_a_sequence_that_no_micro_batch_holds_is_refused(base: dict[str, Any]) -> None:
    # "9+1=" is 4 tokens; with 8 new ones 12
    assert planned(base, "learner.micro_batch_tokens=12")
    message = refusal(ConfigRefused, base, "learner.micro_batch_tokens=11")
    assert "12" in message and "11" in message


def test_a_reward_function_that_is_none_is_refused(base: dict[str, Any]) -> None:
    assert "no_such_module" in refusal(ConfigRefused, base, "reward.function=no_such_module:score")


def test_a_filter_without_prompts_to_spare_makes_the_total_an_upper_bound(base: dict[str, Any]) -> None:
    on = "algorithm.drop_no_spread=true"
    assert planned(base).warnings == []
    assert planned(base, on).warnings == []  # 30 prompts, 28 needed
    (warning,) = planned(base, on, "data.max_prompts=28").warnings
    assert "upper bound" in warning and "7 optimizer steps" in warning


def test_more_workers_and_ranks_than_a_local_ray_has_slots_are_warned_of(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["rollout.workers=3", "learner.ranks=2"]
    assert planned(base, *asked, "cluster.slots=5").warnings == []
    (warning,) = planned(base, *asked, "cluster.slots=4").warnings
    assert warning == (
        "rollout.workers = 3 and learner.ranks = 2 need 5 slots, a local Ray here has 4: train will refuse "
        "them; raise cluster.slots, or use fewer workers or ranks"
    )
    assert f"warning: {warning}" in list(plan_lines(planned(base, *asked, "cluster.slots=4")))
    # another cluster's size is not known here
    assert planned(base, *asked, "cluster.slots=4", "cluster.address=host:6379").warnings == []
    for cores, slots in ((1, 8), (3, 12)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert planned(base, f"rollout.workers={slots - 1}").warnings == []
        assert f"here has {slots}:" in planned(base, f"rollout.workers={slots}").warnings[0]


def test_a_local_ray_is_started_with_the_slots_that_the_plan_counts_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from surefoot.trainer.raysession import _Host

    asked: list[int] = []
    ray = SimpleNamespace(init=lambda **options: asked.append(options["num_cpus"]))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("surefoot.trainer.raysession.loopback", contextlib.nullcontext)  # for Ray's own sake
    for slots in (None, 3):
        host = _Host()
        host._start(slots)
        assert host._folder is not None
        host._folder.remove()
    assert asked == [local_slots(None), 3]


def test_rows_and_rewards_passed_as_objects_are_recorded_by_name(base: dict[str, Any]) -> None:
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(8)]
    config = load_config({**base, "data": {}}, rows="sums")
    prepared = prepare(config, rows, reward=len_reward)
    assert prepared.objects == {"rows": "object:sums", "reward": f"{__name__}:len_reward"}
    assert prepared.budget.prompts_total == 8 and prepared.reward is len_reward


def len_reward(row: dict[str, Any], text: str, ids: list[int]) -> float:
    return float(len(ids))


def test_a_run_goes_on_only_with_the_objects_that_it_began_with(base: dict[str, Any]) -> None:
    config = load_config(base)
    with_reward = prepare(config, reward=len_reward)
    with pytest.raises(ConfigChanged, match="reward: none was passed"):
        config_changes("a", created(with_reward), prepare(config))
    assert config_changes("a", created(with_reward), with_reward) == {}


def test_another_code_of_the_reward_is_recorded_and_refuses_nothing(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "scores.py"
    codes = ["def score(row, text, ids):\n    return 0\n", "def score(row, text, ids):\n    return 1\n"]
    prepared = list[Prepared]()
    for code in codes:
        file.write_text(code)
        prepared.append(planned(base, "reward.function=scores:score"))
    first, second = (xxhash.xxh3_128_hexdigest(code.encode()) for code in codes)
    begun = created(prepared[0])
    changes = digest_changes(begun, prepared[1])
    assert changes == {"reward": [first, second]}
    assert config_changes("a", begun, prepared[1]) == {}
    began = IncarnationBegan(
        incarnation=2, reason=TakeReason.ENDED, host="here", pid=1, digest_changes=changes
    )
    folded = with_changes(begun, began)
    assert digest_changes(folded, prepared[1]) == {}
    assert digest_changes(folded, prepared[0]) == {"reward": [second, first]}


def test_what_may_change_is_recorded_and_what_may_not_is_refused_with_both_values(
    base: dict[str, Any],
) -> None:
    """Report 24."""
    first = created(planned(base))
    assert config_changes("a", first, planned(base, "learner.ranks=2")) == {"learner.ranks": [1, 2]}
    with pytest.raises(ConfigChanged, match=r"batch\.prompts = 5.*started with 4"):
        config_changes("a", first, planned(base, "batch.prompts=5"))


def test_data_or_weights_changed_in_place_are_refused(base: dict[str, Any], tmp_path: Path) -> None:
    """Report 24."""
    first = created(planned(base))
    write_rows(tmp_path / "rows.jsonl", 10, prompt="{i} + 1 =")
    with pytest.raises(ConfigChanged, match="the digest of the data is"):
        config_changes("a", first, planned(base))
    write_rows(tmp_path / "rows.jsonl", 10)
    assert config_changes("a", first, planned(base)) == {}
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(ConfigChanged, match="the digest of the weights is"):
        config_changes("a", first, planned(base))


def test_a_tokenizer_changed_in_place_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    """Report 24: two words of the vocabulary swapped, of which no row has one, so the data are the same."""
    first = created(planned(base))
    path = tmp_path / "model" / "tokenizer.json"
    whole = json.loads(path.read_text())
    words = whole["model"]["vocab"]
    words["x"], words["y"] = words["y"], words["x"]
    path.write_text(json.dumps(whole))
    now = planned(base)
    assert {name for name in first.digests if first.digests[name] != now.digests[name]} == {"tokenizer"}
    with pytest.raises(ConfigChanged, match="the digest of the tokenizer is") as caught:
        config_changes("a", first, now)
    assert caught.value.facts["keys"] == ["tokenizer"]


def test_a_run_is_created_with_the_digest_of_all_that_it_reads(base: dict[str, Any], tmp_path: Path) -> None:
    assert set(first_event(planned(base)).digests) == {"data", "tokenizer", "weights"}
    held_out = write_rows(tmp_path / "held.jsonl", 3, prompt="{i}+0=")
    evaluated = first_event(planned(base, "eval.every_updates=1", f"eval.source={held_out}"))
    assert set(evaluated.digests) == {"data", "tokenizer", "weights", "eval"}
    assert len(set(evaluated.digests.values())) == 4
    write_rows(held_out, 3, prompt="{i}-0=")
    with pytest.raises(ConfigChanged, match="the digest of the eval is"):
        config_changes("a", evaluated, planned(base, "eval.every_updates=1", f"eval.source={held_out}"))


def test_the_same_data_and_model_may_lie_elsewhere(base: dict[str, Any], tmp_path: Path) -> None:
    first = created(planned(base))
    moved = write_rows(tmp_path / "moved.jsonl", 10)
    assert config_changes("a", first, planned(base, f"data.source={moved}")) == {
        "data.source": [base["data"]["source"], str(moved)]
    }
    other = write_rows(tmp_path / "other.jsonl", 10, prompt="{i}  +1=")
    with pytest.raises(ConfigChanged, match=r"data\.source"):
        config_changes("a", first, planned(base, f"data.source={other}"))


def test_the_budget_planned_is_all_that_the_event_holds(base: dict[str, Any]) -> None:
    prepared = planned(base)
    for key, value in msgspec.to_builtins(prepared.budget).items():
        assert plan_dict(prepared)[key] == value
