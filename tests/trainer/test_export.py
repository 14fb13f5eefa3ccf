"""What is exported is what was trained, in the form that from_pretrained loads, or nothing at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from surefoot.statemachine import events as ev
from surefoot.statemachine.errors import CheckpointUnusable, UserMistake
from surefoot.trainer.checkpoints import Checkpoints, Manifest
from surefoot.trainer.cli import main
from surefoot.trainer.export import export
from surefoot.trainer.places import Place
from surefoot.trainer.weights import digest_of, raw

from .models import CHARACTERS, write_model
from .stories import Story

Trained = tuple[Place, dict[str, torch.Tensor], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A completed run whose last checkpoint holds its own weights; the model it began with is bfloat16."""
    tmp_path = tmp_path_factory.mktemp("trained")
    model = write_model(tmp_path / "model")
    config = LlamaConfig(**json.loads((model / "config.json").read_text()))
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    place = Place("a", tmp_path / "runs")
    story = Story("a", [f"model.path={model}"]).began()
    while story.state.updates < 4:
        story.updated()
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    weights = {name: tensor + 1e-4 * torch.randn_like(tensor) for name, tensor in start.items()}
    checkpoints = Checkpoints(tmp_path / "made")
    checkpoints.make_folder("u4")
    stored = {f"weights.{name}": tensor for name, tensor in weights.items()}
    stored["optimizer.step"] = torch.ones(1)
    save(stored, storage_writer=FileSystemWriter(checkpoints.location("u4")[0]), no_dist=True)
    digest = digest_of({name: raw(tensor) for name, tensor in weights.items()})
    manifest = Manifest(
        update=4,
        optimizer_steps=4,
        head_seq=story.state.seq,
        head_hash=story.state.hash,
        weights_digest=digest,
        ranks=1,
        served=None,
        files=checkpoints.describe("u4", ""),
    )
    manifest_digest, size = checkpoints.add_manifest("u4", manifest)
    story.add(
        ev.CheckpointCommitted(
            update=4,
            optimizer_steps=4,
            policy_version=4,
            path="u4",
            manifest_digest=manifest_digest,
            weights_digest=digest,
            bytes=size,
            head_seq=story.state.seq,
            head_hash=story.state.hash,
        )
    )
    story.save(place)
    (tmp_path / "made" / "checkpoints").rename(place.folder / "checkpoints")
    return place, weights, model


def test_from_pretrained_loads_exactly_the_trained_weights(tmp_path: Path, trained: Trained) -> None:
    place, weights, _ = trained
    said = export(place, tmp_path / "out")
    assert "update 4" in said
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert set(loaded.state_dict()) == set(weights)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("1+1=")["input_ids"] == [CHARACTERS.index(one) for one in "1+1="]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


def test_update_0_is_the_starting_model(tmp_path: Path, trained: Trained) -> None:
    place, _, model = trained
    export(place, tmp_path / "out", update=0)
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, start[name]), name


def test_an_update_without_a_kept_checkpoint_is_refused_with_those_there_are(
    tmp_path: Path, trained: Trained
) -> None:
    place = trained[0]
    with pytest.raises(UserMistake, match=r"--update 3: .*updates: 4"):
        export(place, tmp_path / "out", update=3)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(
    tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert main(["export", "a", str(tmp_path / "out"), "--runs-dir", str(trained[0].runs_dir)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_checkpoint_is_never_exported(tmp_path: Path, trained: Trained) -> None:
    shutil.copytree(trained[0].runs_dir, tmp_path / "runs")
    place = Place("a", tmp_path / "runs")
    (shard,) = (place.folder / "checkpoints" / "u4").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointUnusable, match=shard.name):
        export(place, tmp_path / "out")
    assert not (tmp_path / "out").exists()
