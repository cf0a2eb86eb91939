"""EAGLE-3, as SGLang and SpecForge write it and as speculators does."""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.keys import Keys, layer_config, layer_ids, layer_windows, whole_numbers
from speccompile.export.errors import UserError

DEFAULT_WIDTH = 8
"""Rows of a block where the checkpoint does not say: EAGLE-3 is trained with an unroll of 7."""
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def _default_taps(layers: int | None, source: Path) -> tuple[int, ...]:
    """The three taps of EAGLE-3's own format where a config names none (SGLang, speculators)."""
    if layers is None:
        raise UserError(
            f"{source} names no layers to tap, so the format's own rule holds, which counts from the target's end; name the target too."
        )
    return 2, layers // 2, layers - 3


def _common(layers: PretrainedConfig, values: dict[str, Any], keys: Keys, vocab_size: int) -> dict[str, Any]:
    source = keys.source
    whole_numbers(values, _SIZES, source)
    reduced = keys.get("draft_vocab_size")
    return dict(
        backbone="chain",
        hidden_size=layers.hidden_size,
        num_hidden_layers=layers.num_hidden_layers,
        num_attention_heads=layers.num_attention_heads,
        num_key_value_heads=layers.num_key_value_heads,
        head_dim=getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads,
        intermediate_size=layers.intermediate_size,
        vocab_size=vocab_size,
        draft_vocab_size=reduced if reduced != vocab_size else None,
        causal=(True,) * layers.num_hidden_layers,
        rope_parameters=dict(layers.rope_parameters),
        max_position_embeddings=layers.max_position_embeddings,
        rms_norm_eps=layers.rms_norm_eps,
        hidden_act=layers.hidden_act,
        attention_bias=bool(layers.attention_bias),
        norm_before_residual=bool(keys.get("norm_before_residual", False)),
    )


def _tap_norms(keys: Keys) -> str:
    each = bool(keys.get("fc_norm", aliases=("use_aux_norm",)))
    concatenated = bool(keys.get("norm_before_fc"))
    if each and concatenated:
        raise UserError(
            f"{keys.source}: norm_before_fc and fc_norm exclude each other; keep the one the draft was trained with."
        )
    return "each" if each else "concatenated" if concatenated else "none"


def read_eagle3(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """`LlamaForCausalLMEagle3` and its like."""
    keys = Keys(raw, source, ("eagle_config",))
    if target_layers is None:
        raise UserError(f"{source} does not say how many layers its target has; name the target too.")
    if raw.get("norm_output") is not None:
        raise UserError(
            f"{source}: norm_output is read in opposite ways: SpecForge means the norm before the head (its default is true), SGLang and speculators "
            "that the next row is fed the normed state (default false). Remove it if the draft normalises before its head and feeds the state from "
            "before that norm; otherwise convert it by hand to speccompile's form (feeds_normed)."
        )
    whole_numbers(raw, _SIZES, source)
    layers = layer_config(LlamaConfig, raw, source)
    nested, outer = (raw.get("eagle_config") or {}), raw.get("eagle_aux_hidden_state_layer_ids")
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    keys.ignore("eagle_aux_hidden_state_layer_ids")
    # Nested, an id is a decoder layer (SGLang); at the top level, an index into hidden_states (vLLM).
    taps = {
        where: layer_ids(ids, offset, source, where)
        for where, ids, offset in (
            ("eagle_config.eagle_aux_hidden_state_layer_ids", inner, 1),
            ("eagle_aux_hidden_state_layer_ids", outer, 0),
        )
        if ids
    }
    if len(set(taps.values())) > 1:
        raise UserError(
            f"{source}: eagle_config.eagle_aux_hidden_state_layer_ids {inner} (layers, counted from 0) and eagle_aux_hidden_state_layer_ids {outer} "
            "(hidden states) name different taps; keep the one the draft was trained with."
        )
    tapped = next(iter(taps.values()), None) or _default_taps(target_layers, source)
    count = keys.get("num_aux_hidden_states")
    if count is not None and count != len(tapped):
        raise UserError(f"{source}: num_aux_hidden_states is {count}, but {len(tapped)} layers are tapped.")
    if keys.get("use_aux_hidden_state", True) is False:
        raise UserError(
            f"{source}: use_aux_hidden_state is false, so the draft reads the target's last hidden state alone; that is EAGLE-1 or 2, not EAGLE-3."
        )
    config = DraftConfig(
        **_common(layers, raw, keys, raw["vocab_size"]),
        num_target_layers=target_layers,
        tapped_hidden_states=tapped,
        block_width=DEFAULT_WIDTH,
        windows=(None,) * layers.num_hidden_layers,
        qk_norm=False,
        tap_norms=_tap_norms(keys),
        target_hidden_size=keys.get("target_hidden_size"),
        fc_bias=bool(keys.get("bias", False)),
    )
    keys.ignore("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "norm_output")
    if raw.get("use_sliding_window"):
        raise UserError(
            f"{source}: use_sliding_window is set, but readers of this format attend to the whole context; remove it or convert the draft by hand."
        )
    keys.finish()
    return config


def read_speculators(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """`speculators_model_type: eagle3`."""
    keys = Keys(raw, source)
    values = keys.get("transformer_layer_config", required=True)
    if not isinstance(values, dict):
        raise UserError(f"{source}: transformer_layer_config is {values!r}; an object was expected.")
    kind = values.get("model_type", "qwen3")
    if kind not in ("llama", "qwen3"):
        raise UserError(
            f"{source}: transformer_layer_config.model_type is {kind!r}; llama or qwen3 layers were expected."
        )
    layers = layer_config(Qwen3Config if kind == "qwen3" else LlamaConfig, values, source)
    if target_layers is None:
        raise UserError(f"{source} does not say how many layers its target has; name the target too.")
    ids = keys.get("eagle_aux_hidden_state_layer_ids")
    config = DraftConfig(
        **_common(layers, layers.to_dict(), keys, layers.vocab_size),
        num_target_layers=target_layers,
        tapped_hidden_states=layer_ids(ids, 0, source, "eagle_aux_hidden_state_layer_ids")
        if ids
        else _default_taps(target_layers, source),
        block_width=speculative_tokens(keys, DEFAULT_WIDTH - 1) + 1,
        windows=tuple(
            layer_windows(
                getattr(layers, "layer_types", None),
                layers.num_hidden_layers,
                getattr(layers, "sliding_window", None),
                source,
            )
        ),
        qk_norm=kind == "qwen3",
        tap_norms=_tap_norms(keys),
        target_hidden_size=keys.get("target_hidden_size"),
        feeds_normed=bool(keys.get("norm_output", False)),
    )
    keys.ignore(
        "speculators_model_type",
        "speculators_version",
        "embed_requires_grad",
        "speculators_config",
        "has_no_defaults_at_init",
    )
    keys.finish()
    return config


def speculative_tokens(keys: Keys, default: int | None = None) -> int | None:
    """`speculators_config.proposal_methods[…].speculative_tokens`: how many tokens the draft is meant to propose."""
    speculators = keys.get("speculators_config") or {}
    methods = speculators.get("proposal_methods") if isinstance(speculators, dict) else None
    counts = {
        m["speculative_tokens"]
        for m in (methods if isinstance(methods, list) else [])
        if isinstance(m, dict) and isinstance(m.get("speculative_tokens"), int)
    }
    if len(counts) > 1:
        raise UserError(
            f"{keys.source}: speculators_config names several numbers of speculative_tokens, {sorted(counts)}; keep the one to be used."
        )
    return counts.pop() if counts else default
