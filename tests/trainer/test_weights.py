"""Published weights: what the digest is over, what a payload is, and what version 0 is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save, save_file

from surefoot.rollout.payload import (
    RawTensor,
    WeightsDigest,
    digest_of,
    digest_of_payload,
    pack,
    read_tensors,
)
from surefoot.statemachine.errors import ModelRefused
from surefoot.trainer.weights import initial_weights, raw, unpack

from .learner_world import write_model


def a_tensor(value: float = 1.0, shape: tuple[int, ...] = (2, 3)) -> RawTensor:
    return RawTensor("F32", shape, np.full(shape, value, "<f4").tobytes())


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    whole = {"a": a_tensor(), "b": a_tensor(2.0)}
    others = [
        {"a": a_tensor(), "c": a_tensor(2.0)},
        {"a": a_tensor(), "b": a_tensor(3.0)},
        {"a": a_tensor(), "b": a_tensor(2.0, (3, 2))},
        {"a": a_tensor(), "b": RawTensor("I32", (2, 3), a_tensor(2.0).data)},
        {"a": a_tensor()},
        {"a": a_tensor(2.0), "b": a_tensor()},
    ]
    digests = [digest_of(tensors) for tensors in [whole, *others]]
    assert len(set(digests)) == len(digests)


def test_a_digest_does_not_depend_on_order_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"b": a_tensor(2.0), "a": a_tensor()}
    expected = digest_of(whole)
    assert digest_of(dict(reversed(whole.items()))) == expected
    monkeypatch.setattr("surefoot.rollout.payload._CHUNK_BYTES", 5)
    assert digest_of(whole) == expected


def test_tensors_out_of_order_are_refused() -> None:
    digest = WeightsDigest()
    digest.add("b", a_tensor())
    with pytest.raises(ValueError, match="a does not come after b"):
        digest.add("a", a_tensor())


def test_a_payload_is_a_safetensors_file_and_the_digest_is_over_what_was_received() -> None:
    tensors = {"x": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([-0.0])}
    payload = pack({name: raw(tensor) for name, tensor in tensors.items()})
    assert {name: t.tolist() for name, t in load(payload).items()} == {
        name: t.tolist() for name, t in tensors.items()
    }
    expected = digest_of({name: raw(tensor) for name, tensor in tensors.items()})
    assert digest_of_payload(payload) == expected
    assert digest_of_payload(save(tensors)) == expected, "written by the library, in another order"
    assert digest_of_payload(payload[:-1] + bytes([payload[-1] ^ 1])) != expected


@pytest.mark.parametrize("spoilt", ["cut short", "no header", "lying offsets"])
def test_bytes_that_are_no_payload_are_refused(spoilt: str) -> None:
    payload = pack({"a": a_tensor()})
    bad = {
        "cut short": payload[:-4],
        "no header": payload[8:],
        "lying offsets": payload.replace(b"[0,24]", b"[4,28]"),
    }[spoilt]
    with pytest.raises(ValueError, match="no safetensors file"):
        read_tensors(bad)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_version_0_is_the_folder_in_float32_with_tied_weights_once(
    tmp_path: Path, tied: bool, dtype: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "model", tied=tied, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {name: raw(parameter) for name, parameter in model.named_parameters()}
    assert ("lm_head.weight" in expected) is not tied
    published = initial_weights(folder)
    assert published.payload == pack(expected)
    assert (published.version, published.update, published.digest) == (0, 0, digest_of(expected))
    assert set(unpack(published.payload)) == set(expected)


def test_a_tied_output_matrix_that_was_saved_as_well_counts_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", tied=True)
    once = initial_weights(folder)
    tensors = load((folder / "model.safetensors").read_bytes())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert initial_weights(folder) == once


def test_shards_are_put_together(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    whole = initial_weights(folder)
    tensors = load((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert initial_weights(folder) == whole


def test_a_folder_that_lacks_a_weight_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tensors = load((folder / "model.safetensors").read_bytes())
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"model\.norm\.weight not at all"):
        initial_weights(folder)


def test_a_file_that_is_no_safetensors_is_refused_by_its_path(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(ModelRefused, match=r"model\.safetensors cannot be read"):
        initial_weights(folder)


def test_version_0_is_made_without_torch(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    code = (
        "import sys; from surefoot.trainer.weights import initial_weights; "
        f"print(initial_weights({str(folder)!r}).digest, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [initial_weights(folder).digest, "False"]
