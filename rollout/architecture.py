"""What a model folder says about its model, and whether our decoder runs it. Without torch.

Owns the reading of `config.json` and the refusals. Invariant: an `Architecture` exists only for a model
whose every config key that changes the logits is one the decoder honours; anything else is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ..statemachine.errors import ModelRefused

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
WAY_OUT = f"use a full-attention model of the {', '.join(FAMILIES)} families"


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: the base, and how its frequencies are stretched."""

    kind: str
    theta: float
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 0


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape. Field names are ours; where the config has another name it stands beside."""

    family: str  # model_type
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int  # max_position_embeddings: prompt and response together
    tied: bool  # the output matrix is the embedding
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool  # queries and keys are normalised per head
    rope: Rope

    @classmethod
    def of(cls, config: dict[str, Any], where: str) -> Architecture:
        """The architecture of a transformers config; `where` names it in refusals. Raises ModelRefused."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelRefused(
                f"{where}: model_type {family!r} is not one that the engine runs: {WAY_OUT}",
                model_type=family,
            )
        _refuse_what_changes_logits(config, where)

        def integer(name: str, default: int | None = None) -> int:
            value = config.get(name)
            value = default if value is None else value
            if not isinstance(value, int) or value < 1:
                raise ModelRefused(
                    f"{where}: {name} is {value!r}, which must be an integer of at least 1: "
                    "save the model again with save_pretrained",
                    key=name,
                )
            return value

        heads = integer("num_attention_heads")
        hidden = integer("hidden_size")
        kv_heads = integer("num_key_value_heads", heads)
        head_dim = integer("head_dim", 128 if family == "qwen3" else hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise ModelRefused(
                f"{where}: {heads} heads over {kv_heads} key-value heads of size {head_dim} cannot be: "
                "key-value heads must divide heads, and the size must be even",
            )
        context = integer("max_position_embeddings")
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocabulary=integer("vocab_size"),
            hidden=hidden,
            intermediate=integer("intermediate_size"),
            layers=integer("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context=context,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            head_norm=family == "qwen3",
            rope=_rope(config, context, where),
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by the name transformers gives it; a tied output matrix counts once."""
        hidden, inner = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        matrices = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        for layer in range(self.layers):
            base = f"model.layers.{layer}."
            for name, (rows, columns, biased) in matrices.items():
                shapes[f"{base}{name}.weight"] = (rows, columns)
                if biased:
                    shapes[f"{base}{name}.bias"] = (rows,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{base}{name}.weight"] = (hidden,)
            if self.head_norm:
                for name in ("self_attn.q_norm", "self_attn.k_norm"):
                    shapes[f"{base}{name}.weight"] = (self.head_dim,)
        return shapes


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises ModelRefused if there is none."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(
            f"{folder} is not a model folder: it has no readable config.json: "
            "name a folder written by save_pretrained",
            path=str(folder),
        ) from error
    except ValueError as error:
        raise ModelRefused(
            f"{path} is not JSON ({error}): save the model again with save_pretrained", path=str(folder)
        ) from error
    if not isinstance(config, dict):
        raise ModelRefused(
            f"{path} is not a JSON object: save the model again with save_pretrained", path=str(folder)
        )
    return config


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of a model folder. Raises ModelRefused."""
    return Architecture.of(read_config(folder), str(folder))


def _refuse_what_changes_logits(config: dict[str, Any], where: str) -> None:
    heads_on_top = [name for name in config.get("architectures") or [] if not name.endswith("ForCausalLM")]
    if heads_on_top:
        raise ModelRefused(
            f"{where}: architecture {heads_on_top[0]} is no language model: use a ...ForCausalLM",
            architecture=heads_on_top[0],
        )
    layer_types = set(config.get("layer_types") or []) - {"full_attention"}
    slides = (
        bool(config.get("use_sliding_window"))
        and config.get("sliding_window") is not None
        and config.get("layer_types") is None
        and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)
    )
    if layer_types or slides:
        kind = min(layer_types) if layer_types else "sliding_attention"
        raise ModelRefused(f"{where}: {kind} layers are not full attention: {WAY_OUT}", attention=kind)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelRefused(
            f"{where}: hidden_act {activation!r} is not 'silu', the one that the engine runs: {WAY_OUT}",
            hidden_act=activation,
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ModelRefused(
            f"{where}: weights quantised by {method!r} cannot be trained: use the model's plain weights",
            quantization=method,
        )


def _rope(config: dict[str, Any], context: int, where: str) -> Rope:
    # transformers 5 writes it all into rope_parameters; older folders have rope_theta beside rope_scaling.
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelRefused(
            f"{where}: rope type {kind!r} is not one that the engine runs ({', '.join(ROPE_TYPES)}): "
            "use a model without that scaling",
            rope_type=kind,
        )
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ModelRefused(
            f"{where}: partial_rotary_factor {partial} is not 1, the one that the engine runs: {WAY_OUT}",
            partial_rotary_factor=partial,
        )
    theta = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
    try:
        if kind == "llama3":
            return Rope(
                kind=kind,
                theta=float(theta),
                factor=float(given["factor"]),
                low_frequency_factor=float(given["low_freq_factor"]),
                high_frequency_factor=float(given["high_freq_factor"]),
                original_positions=int(given.get("original_max_position_embeddings") or context),
            )
        return Rope(kind=kind, theta=float(theta), factor=float(given["factor"]) if kind == "linear" else 1.0)
    except KeyError as error:
        raise ModelRefused(
            f"{where}: rope type {kind!r} needs {error.args[0]}, which the config does not give: "
            "add it to config.json",
            rope_type=kind,
        ) from error
