"""The parallel family: z-lab, SpecForge, JetSpec and DeepSpec write one form with different keys; speculators another."""

from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.keys import (
    SIZES,
    Keys,
    layer_config,
    layer_ids,
    layer_windows,
    whole_numbers,
)
from speccompile.compiler.drafts.read_chain import speculative_tokens
from speccompile.export.errors import UserError

_TRAINING = ("num_anchors", "confidence_head_alpha", "loss_decay_gamma", "attention_mode", "is_draft", "mask_token", "projector_type",
             "is_causal", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")  # fmt: skip


def _causal(keys: Keys, kinds: list[int | None], *, by_window: bool = True) -> tuple[bool, ...]:
    """Causality inside the block, from all its spellings; silent, a sliding layer is causal and a full one is not."""
    said = {
        name: value
        for name in ("is_causal", "causal", "causal_head", "dflash_query_causal")
        if (value := keys.get(name)) is not None
    }
    if len(set(map(bool, said.values()))) > 1:
        raise UserError(
            f"{keys.source}: {said} contradict each other on whether a block row sees later rows; keep what the draft was trained with."
        )
    for name, value in said.items():
        if not isinstance(value, bool):
            raise UserError(f"{keys.source}: {name} is {value!r}; true or false was expected.")
    if said:
        return (next(iter(said.values())),) * len(kinds)
    return tuple(bool(window) and by_window for window in kinds)


def _windows(keys: Keys, raw: dict[str, Any], layers: int) -> tuple[list[int | None], bool]:
    """Windows per layer, and whether a windowed layer is causal by default (not where `use_swa` alone asks for windows)."""
    windows = layer_windows(raw.get("layer_types"), layers, raw.get("sliding_window"), keys.source)
    width = keys.get("swa_window_size", raw.get("sliding_window"))
    if not keys.get("use_swa") or any(windows):
        return windows, True
    if not width:
        raise UserError(
            f"{keys.source}: use_swa is set, but neither swa_window_size nor sliding_window says how wide; add the window."
        )
    return [width] * layers, False


def _nested(
    raw: dict[str, Any], source: Path, objects: tuple[str, ...] = ("dflash_config",), lowest_id: int = 0
) -> tuple[Keys, dict[str, Any]]:
    """What every dialect of the nested form says alike."""
    keys = Keys(raw, source, objects)
    whole_numbers(raw, SIZES, source)
    layers = layer_config(Qwen3Config, raw, source)
    windows, by_window = _windows(keys, raw, raw["num_hidden_layers"])
    values = dict(
        **{name: raw[name] for name in SIZES},
        num_target_layers=keys.get("num_target_layers", required=True),
        tapped_hidden_states=layer_ids(
            keys.get("target_layer_ids", required=True), 1, source, "target_layer_ids", lowest_id
        ),
        mask_token_id=keys.get("mask_token_id", required=True),
        block_width=keys.get("block_size", required=True),
        causal=_causal(keys, windows, by_window=by_window),
        windows=tuple(windows),
        rope_parameters=dict(layers.rope_parameters),
        rms_norm_eps=layers.rms_norm_eps,
        hidden_act=layers.hidden_act,
        attention_bias=layers.attention_bias,
        output_multiplier=keys.get("output_multiplier", 1.0),
        final_logit_softcapping=keys.get("final_logit_softcapping") or None,
        input_embedding_scale=keys.get("input_embedding_scale", 1.0),
        attention_sinks=bool(keys.get("attention_sink_bias", False)),
        attention_value_scale=keys.get("attention_value_scale") or 1.0,
        rope_interleaved=not keys.get("rope_is_neox_style", True, aliases=("is_neox_style",)),
    )
    if keys.get("target_hidden_size", raw["hidden_size"]) != raw["hidden_size"]:
        raise UserError(
            f"{source}: target_hidden_size {keys.get('target_hidden_size')} is not the draft's hidden_size {raw['hidden_size']}: the features would pass "
            "an untrained adapter, so the draft is refused."
        )
    keys.ignore(*_TRAINING)
    return keys, values


def _done(keys: Keys, values: dict[str, Any], **more: Any) -> DraftConfig:
    keys.finish()
    return DraftConfig(**values | more)


def read_zlab(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """z-lab's DFlash, and SpecForge's."""
    return _done(*_nested(raw, source))


def read_jetspec(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """JetSpec: DFlash's form with `causal_head`, which other readers overlook."""
    return _done(*_nested(raw, source, ("dflash_config", "jetspec_config")))


def read_dflash2(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """z-lab's DFlash 2: convolutions around every sub-layer and a candidate selector."""
    keys, values = _nested(raw, source)
    return _done(keys, values, **_convolution(keys), **_selector(keys))


def _convolution(keys: Keys) -> dict[str, Any]:
    return dict(
        depth_mixing="convolution",
        conv_kernel_size=keys.get("conv_kernel_size", required=True),
        conv_group_size=keys.get("conv_group_size", required=True),
    )


def _selector(keys: Keys) -> dict[str, Any]:
    return dict(
        head="selector",
        head_rank=keys.get("selector_rank", required=True),
        head_candidates=keys.get("selector_top_k", required=True),
    )


def read_domino(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """SpecForge's Domino. With `shift_label` row r predicts position n+r+1, and the last of the B rows is run for nothing."""
    keys, values = _nested(raw, source)
    shifted = keys.get("shift_label", False)
    head = dict(
        head="gru",
        head_rank=keys.get("emb_dim", required=True),
        head_state_size=keys.get("gru_hidden_dim", required=True),
        head_prefix=keys.get("pure_draft_prefix_len", 0),
        layout="anchor_first_full" if shifted else "in_place",
    )
    return _done(keys, values, **head)


def _anchor_first(values: dict[str, Any], sampled: bool) -> dict[str, Any]:
    """DSpark's widths: `block_size` B counts proposals, so a verify block has B+1 rows; the draft runs B of them, or, if
    the anchor's row is not sampled, all B+1."""
    width = values["block_width"]
    return dict(
        block_width=width + 1 if isinstance(width, int) else width,
        layout="anchor_first" if sampled else "in_place",
    )


def _markov(keys: Keys, confidence_default: bool | None) -> dict[str, Any]:
    rank = keys.get("markov_rank", required=True)
    kind = keys.get("markov_head_type", "vanilla", required=bool(rank))
    if kind not in ("vanilla", "gated", "rnn"):
        raise UserError(f"{keys.source}: markov_head_type is {kind!r}; vanilla, gated or rnn was expected.")
    confident = keys.get("enable_confidence_head", confidence_default, required=confidence_default is None)
    with_markov = keys.get("confidence_head_with_markov", False, required=bool(confident))
    return dict(
        head={"vanilla": "markov", "gated": "markov_gated", "rnn": "markov_rnn"}[kind]
        if rank
        else "independent",
        head_rank=rank or None,
        confidence="none" if not confident else "hidden_and_previous" if with_markov else "hidden",
    )


def read_specforge_dspark(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """SpecForge's DSpark, as SGLang serves it: anchor-first unless `sample_from_anchor` is false."""
    keys, values = _nested(raw, source, ("dflash_config", "dspark_config"))
    markov = _markov(keys, bool(keys.get("confidence_head_alpha", 0.0)))
    return _done(keys, values, **_anchor_first(values, bool(keys.get("sample_from_anchor", True))), **markov)


def read_deepspec(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """DeepSpec's DSpark; with `markov_rank` 0 its DFlash, which is anchor-first too. Layer id -1 is the embedding."""
    keys, values = _nested(raw, source, (), lowest_id=-1)
    return _done(keys, values, **_anchor_first(values, True), **_markov(keys, None))


def read_speculators(raw: dict[str, Any], source: Path, target_layers: int | None = None) -> DraftConfig:
    """speculators' dflash, dflash2, dspark and xpress: layer ids are indices into hidden_states already."""
    keys, kind = Keys(raw, source), raw["speculators_model_type"]
    values = keys.get("transformer_layer_config", required=True)
    if not isinstance(values, dict) or values.get("model_type", "qwen3") != "qwen3":
        raise UserError(
            f"{source}: transformer_layer_config is not that of Qwen3 layers; only those are built."
        )
    layers = layer_config(Qwen3Config, values, source)
    if target_layers is None:
        raise UserError(f"{source} does not say how many layers its target has; name the target too.")
    windows = layer_windows(layers.layer_types, layers.num_hidden_layers, layers.sliding_window, source)
    causal = not keys.get("sliding_window_non_causal", kind == "dflash2")
    block, sampled = (
        keys.get("block_size", required=True),
        bool(keys.get("sample_from_anchor", kind == "dspark")),
    )
    stated = speculative_tokens(keys)
    if isinstance(block, int) and stated is not None and stated != (block if sampled else block - 1):
        raise UserError(
            f"{source}: block_size {block} with sample_from_anchor {sampled} proposes {block if sampled else block - 1} tokens, but speculators_config says "
            f"{stated} speculative_tokens; keep what the draft was trained with."
        )
    reduced = keys.get("draft_vocab_size", required=True)
    ids = keys.get("aux_hidden_state_layer_ids", required=True, aliases=("eagle_aux_hidden_state_layer_ids",))
    common = dict(
        **{name: getattr(layers, name) for name in SIZES},
        draft_vocab_size=reduced if reduced != layers.vocab_size else None,
        num_target_layers=target_layers,
        tapped_hidden_states=layer_ids(ids, 0, source, "aux_hidden_state_layer_ids"),
        mask_token_id=keys.get("mask_token_id", required=True),
        block_width=block,
        causal=tuple(bool(w) and causal for w in windows),
        windows=tuple(windows),
        rope_parameters=dict(layers.rope_parameters),
        rms_norm_eps=layers.rms_norm_eps,
        hidden_act=layers.hidden_act,
        attention_bias=layers.attention_bias,
        target_hidden_size=keys.get("target_hidden_size"),
    )
    if sampled:
        common |= _anchor_first(common, True)
    if kind == "dflash2":
        common |= _convolution(keys) | _selector(keys)
    elif kind == "dspark":
        common |= _markov(keys, True)
    elif kind == "xpress":
        common |= dict(
            head="jacobi", head_rank=keys.get("xpress_rank", required=True), head_mlp_ratio=keys.get("xpress_mlp_ratio", required=True),
            head_passes=keys.get("num_jacobi_passes", required=True),
        )  # fmt: skip
    keys.ignore(
        "speculators_model_type", "speculators_version", "has_no_defaults_at_init", "speculators_config"
    )
    return _done(keys, common)
