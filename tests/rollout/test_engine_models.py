"""Models: logits as transformers computes them, folders read, everything else refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.rollout.architecture import Architecture, read_architecture
from surefoot.rollout.attention import DecodeRows, PromptBlock
from surefoot.rollout.decoder import Decoder
from surefoot.rollout.folders import load_folder
from surefoot.rollout.torch_engine import TorchEngine
from surefoot.statemachine.errors import ModelRefused, UserMistake

from .tiny_decoders import (
    LLAMA3_ROPE,
    SHAPE,
    VARIANTS,
    architecture_of,
    engine_for,
    random_prompts,
    saved,
    tensors_of,
    tiny_model,
)


def last_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0, -1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers_at_every_token(variant: str) -> None:
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes)
    decoder = Decoder(architecture_of(model), slots=6, length=64)
    decoder.load(tensors_of(model))
    # Rows of unequal length, two that share a prompt, a prompt of one token; then a prompt joins while the
    # others are decoded.
    prompts = random_prompts([7, 1, 50, 12])
    sequences = [prompts[0], prompts[1], prompts[1], prompts[2]]
    with torch.inference_mode():
        block = PromptBlock([np.array(prompt) for prompt in prompts[:3]], np.array([0, 1, 1, 2]), 0)
        assert_logits(model, decoder.forward(None, block), sequences)
        for step in range(5):
            forced = np.random.default_rng(step).integers(0, SHAPE["vocab_size"], size=len(sequences))
            rows = DecodeRows(forced, np.array([len(sequence) for sequence in sequences]))
            sequences = [[*sequence, int(token)] for sequence, token in zip(sequences, forced, strict=True)]
            joining = PromptBlock([np.array(prompts[3])], np.array([0]), 4) if step == 2 else None
            sequences += [prompts[3]] if joining else []
            assert_logits(model, decoder.forward(rows, joining), sequences)


def assert_logits(model: Any, logits: torch.Tensor, sequences: list[list[int]]) -> None:
    expected = torch.stack([last_logits(model, sequence) for sequence in sequences])
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_stays_near_single_precision() -> None:
    for family in ("Llama", "Qwen3"):
        model = tiny_model(family, head_dim=16)
        decoder = Decoder(architecture_of(model), slots=1, length=32, dtype=torch.bfloat16)
        decoder.load(tensors_of(model))
        prompt = random_prompts([20])[0]
        with torch.inference_mode():
            logits = decoder.forward(None, PromptBlock([np.array(prompt)], np.array([0]), 0))
            assert logits.dtype == torch.float32
            assert (logits[0] - last_logits(model, prompt)).abs().max() < 0.1
            logits = decoder.forward(DecodeRows(np.array([5]), np.array([20])), None)
            assert (logits[0] - last_logits(model, [*prompt, 5])).abs().max() < 0.1


def test_a_folder_is_read_whole_or_in_shards_as_single_precision(tmp_path: Path) -> None:
    model = tiny_model("Qwen2", tie_word_embeddings=True)
    whole = saved(model, tmp_path / "whole")
    shards = saved(model, tmp_path / "shards", max_shard_size="20KB")
    halved = saved(tiny_model("Qwen2", tie_word_embeddings=True).bfloat16(), tmp_path / "halved")
    assert len(list(shards.glob("*.safetensors"))) > 1
    config, tensors = load_folder(whole)
    assert config["model_type"] == "qwen2"
    for name, tensor in tensors.items():
        assert torch.equal(tensor, tensors_of(model)[name])
    _, in_shards = load_folder(shards)
    assert in_shards.keys() == tensors.keys()
    assert all(torch.equal(in_shards[name], tensors[name]) for name in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in load_folder(halved)[1].values())
    engine = TorchEngine(Architecture.of(config, "it"), slots=1, max_tokens=8, stop_ids=[])
    engine.load_weights(0, tensors)


def test_parameter_names_and_shapes_are_those_of_transformers() -> None:
    for family, changes in VARIANTS.values():
        model = tiny_model(family, **changes)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert architecture_of(model).parameter_shapes() == shapes


def test_the_old_way_to_write_rope_means_the_same() -> None:
    config = tiny_model(rope_parameters=LLAMA3_ROPE).config.to_dict()
    scaling = dict(config.pop("rope_parameters"))
    theta = scaling.pop("rope_theta")
    for old in (
        scaling,
        {"type": scaling["rope_type"], **{k: v for k, v in scaling.items() if k != "rope_type"}},
    ):
        now = Architecture.of(config | {"rope_theta": theta, "rope_scaling": old}, "old")
        assert now == architecture_of(tiny_model(rope_parameters=LLAMA3_ROPE))


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "mistral"}, "'mistral'"),
    "no family": ({"model_type": None}, "model_type None"),
    "sliding windows, by layer": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding_attention",
    ),
    "sliding windows, the old way": (
        {
            "model_type": "qwen2",
            "layer_types": None,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
        "sliding_attention",
    ),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    "rope in part": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
    "rope lacking a key": ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    "no language model": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification",
    ),
    "a key missing": ({"hidden_size": None}, "hidden_size is None"),
    "heads": ({"num_key_value_heads": 4}, "6 heads over 4"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_engine_does_not_run_is_refused_by_name(case: str) -> None:
    changes, named = REFUSALS[case]
    with pytest.raises(ModelRefused) as refusal:
        Architecture.of(tiny_model().config.to_dict() | changes, "some/folder")
    message = str(refusal.value)
    assert isinstance(refusal.value, UserMistake)
    assert named in message and message.startswith("some/folder: ") and "\n" not in message


def test_a_window_that_no_layer_uses_is_full_attention() -> None:
    config = tiny_model("Qwen2").config.to_dict()
    unused = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": None}
    assert Architecture.of(config | unused, "it") == Architecture.of(config, "it")


@pytest.mark.parametrize("broken", ["nothing", "no json", "a list", "no weights", "shard missing", "torn"])
def test_a_folder_that_is_no_model_is_refused_by_name(broken: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if broken != "nothing":
        saved(tiny_model(), folder, max_shard_size="20KB" if broken == "shard missing" else "1GB")
    if broken == "no json":
        (folder / "config.json").write_text("{")
    elif broken == "a list":
        (folder / "config.json").write_text("[]")
    elif broken == "no weights":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif broken == "shard missing":
        max(folder.glob("*.safetensors")).unlink()
    elif broken == "torn":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelRefused) as refusal:
        load_folder(folder)
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("wrong", ["lacking", "shape", "foreign"])
def test_weights_of_another_model_are_refused_and_the_old_ones_stay(wrong: str) -> None:
    model = tiny_model()
    decoder = Decoder(architecture_of(model), slots=1, length=16)
    decoder.load(tensors_of(model))
    other = tensors_of(tiny_model(seed=1))
    name = "model.layers.1.mlp.down_proj.weight"
    if wrong == "lacking":
        del other[name]
    elif wrong == "shape":
        other[name] = other[name][:, :-1]
    else:
        name = "model.layers.1.self_attn.q_norm.weight"
        other[name] = torch.ones(8)
    with pytest.raises(ModelRefused, match=name):
        decoder.load(other)
    prompt = random_prompts([5])[0]
    with torch.inference_mode():
        logits = decoder.forward(None, PromptBlock([np.array(prompt)], np.array([0]), 0))
    assert_logits(model, logits, [prompt])


def test_tied_weights_may_come_under_either_name() -> None:
    model = tiny_model(tie_word_embeddings=True)
    tensors = tensors_of(model)
    assert "lm_head.weight" in tensors  # transformers names both
    prompt = random_prompts([5])[0]
    for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
        decoder = Decoder(architecture_of(model), slots=1, length=16)
        decoder.load({name: tensor for name, tensor in tensors.items() if name != left_out})
        with torch.inference_mode():
            logits = decoder.forward(None, PromptBlock([np.array(prompt)], np.array([0]), 0))
        assert_logits(model, logits, [prompt])


def test_more_tokens_than_the_context_are_refused_with_both_numbers() -> None:
    with pytest.raises(ModelRefused, match=r"129 tokens.*128"):
        engine_for(tiny_model(), max_tokens=129)


def test_reading_an_architecture_needs_no_torch(tmp_path: Path) -> None:
    folder = saved(tiny_model("Qwen3", head_dim=8), tmp_path)
    script = (
        "import sys, surefoot.rollout.engine\n"
        "from surefoot.rollout.architecture import read_architecture\n"
        f"print(read_architecture({str(folder)!r}).context, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["128", "False"]
    assert read_architecture(folder).family == json.loads((folder / "config.json").read_text())["model_type"]
