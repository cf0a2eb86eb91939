"""What a draft checkpoint says, in one internal form, whatever dialect it was written in.

Two dialects are read: z-lab's (`DFlashDraftModel`, Qwen3 fields and a nested `dflash_config`) and our own
(`SpeccompileDraft`, the flat fields of `DraftConfig`). Nothing is guessed: a key that decides which
numbers the draft sees (layer ids, mask token, block width) is required, and one this module cannot honour is
refused by name.
"""

from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from speccompile.export.errors import UserError

OUR_ARCHITECTURE = "SpeccompileDraft"
ZLAB_ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DraftConfig:
    """A resolved draft. Layer ids count decoder layers from 0: id i is the output of layer i, HF `hidden_states[i+1]`."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    causal: tuple[bool, ...]
    """Per layer: whether a block row sees only the rows before it."""
    windows: tuple[int | None, ...]
    """Per layer: sliding window in tokens, or None."""
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    depth_mixing: str = "none"
    """`none`, or `shift`: x_r += W · RMSNorm(x_{r-1}) before every layer."""
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0

    @property
    def family(self) -> str:
        return "causal-depth" if self.depth_mixing != "none" else "dflash"

    def rotary(self) -> Qwen3Config:
        """The Transformers config from which the rotary embedding is built (default, linear, yarn, …)."""
        return Qwen3Config(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
        )

    def to_json(self) -> dict[str, Any]:
        """The flat form of our own dialect."""
        return {"architectures": [OUR_ARCHITECTURE], "model_type": "speccompile_draft", **asdict(self)}


_REQUIRED_ZLAB = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings",
)  # fmt: skip
_NESTED_ZLAB = {
    "mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "output_multiplier",
    "final_logit_softcapping", "input_embedding_scale", "mask_token",
}  # fmt: skip
_OTHER_FAMILIES = {
    "conv_kernel_size": "DFlash 2", "selector_rank": "DFlash 2", "projector_type": "SpecForge Domino or DSpark",
    "speculators_model_type": "speculators", "markov_rank": "DSpark", "jetspec_config": "JetSpec", "eagle_config": "EAGLE-3",
    "gru_hidden_dim": "Domino", "layer_fusion_weights": "DFly",
}  # fmt: skip


def read_draft_config(raw: dict[str, Any], source: Path) -> DraftConfig:
    """Resolve a draft's config.json. Raises UserError naming `source` and the key at fault."""
    architectures = raw.get("architectures") or []
    for key, family in _OTHER_FAMILIES.items():
        if raw.get(key) is not None or _nested(raw, source).get(key) is not None:
            raise UserError(
                f"{source} has the key {key}: a {family} draft, which this version cannot build; DFlash and causal-depth drafts are supported."
            )
    if architectures == [OUR_ARCHITECTURE]:
        config = _read_ours(raw, source)
    elif architectures == [ZLAB_ARCHITECTURE]:
        config = _read_zlab(raw, source)
    else:
        raise UserError(
            f"{source} has architectures {architectures}; a draft of {ZLAB_ARCHITECTURE} (z-lab) or {OUR_ARCHITECTURE} was expected."
        )
    _check(config, source)
    return config


def _nested(raw: dict[str, Any], source: Path) -> dict[str, Any]:
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise UserError(f"{source}: dflash_config is a {type(nested).__name__}; an object was expected.")
    return nested


def _read_zlab(raw: dict[str, Any], source: Path) -> DraftConfig:
    nested = _nested(raw, source)
    for key in sorted(set(nested) - _NESTED_ZLAB):
        if nested[key]:
            raise UserError(
                f"{source}: dflash_config.{key} = {nested[key]!r} is not supported; it would change the draft's numbers, so it is not ignored."
            )
    for key in _REQUIRED_ZLAB:
        if raw.get(key) is None:
            raise UserError(
                f"{source} lacks {key}; nothing is guessed, so add the value the draft was trained with."
            )

    def either(key: str, default: Any = None, required: bool = False) -> Any:
        """`dflash_config` first, then the top level; both may be given only if they agree."""
        inner, outer = nested.get(key), raw.get(key)
        if inner is not None and outer is not None and inner != outer:
            raise UserError(
                f"{source}: dflash_config.{key} is {inner!r} but the top level says {outer!r}; keep the one the draft was trained with."
            )
        value = inner if inner is not None else outer
        if value is None and required:
            raise UserError(
                f"{source} lacks dflash_config.{key}; nothing is guessed, so add the value the draft was trained with."
            )
        return default if value is None else value

    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"{source}: layer_types is {kinds}; {layers} entries of full_attention or sliding_attention were expected."
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not raw.get("sliding_window"):
        raise UserError(
            f"{source} has sliding_attention layers but no sliding_window; add the window the draft was trained with."
        )
    causal = raw.get("is_causal")
    try:
        resolved = Qwen3Config.from_dict(raw)
    except Exception as error:
        raise UserError(
            f"{source} is not a valid Qwen3 draft configuration: {' '.join(str(error).split())[:300]}"
        ) from None
    return DraftConfig(
        **{key: raw[key] for key in _REQUIRED_ZLAB},
        num_target_layers=either("num_target_layers", required=True),
        target_layer_ids=tuple(either("target_layer_ids", required=True)),
        mask_token_id=either("mask_token_id", required=True),
        block_size=either("block_size", required=True),
        causal=tuple(sliding if causal is None else [bool(causal)] * layers),
        windows=tuple(raw["sliding_window"] if s else None for s in sliding),
        rope_parameters=dict(resolved.rope_parameters),
        rms_norm_eps=resolved.rms_norm_eps,
        hidden_act=resolved.hidden_act,
        attention_bias=resolved.attention_bias,
        output_multiplier=float(either("output_multiplier", 1.0)),
        final_logit_softcapping=either("final_logit_softcapping"),
        input_embedding_scale=float(either("input_embedding_scale", 1.0)),
    )


def _read_ours(raw: dict[str, Any], source: Path) -> DraftConfig:
    known = {field.name: field for field in fields(DraftConfig)}
    generic = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
    for key in raw:
        if key not in known and key not in generic:
            raise UserError(
                f"{source}: the key {key} is not one of a {OUR_ARCHITECTURE} configuration; remove it or check its spelling."
            )
    for name, field in known.items():
        if name not in raw and field.default is MISSING:
            raise UserError(
                f"{source} lacks {name}; nothing is guessed, so add the value the draft was trained with."
            )
    values = {name: raw[name] for name in known if name in raw}
    for name in ("target_layer_ids", "causal", "windows"):
        if not isinstance(values[name], list):
            raise UserError(f"{source}: {name} is {values[name]!r}; a list was expected.")
        values[name] = tuple(values[name])
    return DraftConfig(**values)


def _check(config: DraftConfig, source: Path) -> None:
    """What no draft may contradict. Types first, so that a string where a number belongs is named, not crashed on."""
    for name in (*_REQUIRED_ZLAB, "num_target_layers", "mask_token_id", "block_size"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{source}: {name} is {value!r}; a whole number was expected.")
        if value < 1 and name != "mask_token_id":
            raise UserError(f"{source}: {name} is {value}; at least 1 was expected.")
    for name in ("rms_norm_eps", "output_multiplier", "input_embedding_scale", "final_logit_softcapping"):
        value = getattr(config, name)
        if value is None and name == "final_logit_softcapping":
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{source}: {name} is {value!r}; a number was expected.")
    if config.rms_norm_eps <= 0:
        raise UserError(f"{source}: rms_norm_eps is {config.rms_norm_eps}; a number above 0 was expected.")
    if not isinstance(config.attention_bias, bool):
        raise UserError(f"{source}: attention_bias is {config.attention_bias!r}; true or false was expected.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{source}: num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads {config.num_key_value_heads}."
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise UserError(
            f"{source}: mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size} tokens."
        )
    if config.block_size < 2:
        raise UserError(
            f"{source}: block_size {config.block_size} leaves no row to propose with; at least 2 was expected."
        )
    if not config.target_layer_ids:
        raise UserError(f"{source}: target_layer_ids is empty; at least one target layer must be tapped.")
    for layer in config.target_layer_ids:
        if not isinstance(layer, int) or not 0 <= layer < config.num_target_layers - 1:
            raise UserError(
                f"{source}: target_layer_ids has {layer!r}; ids from 0 to {config.num_target_layers - 2} were expected, counting decoder "
                f"layers of a {config.num_target_layers}-layer target from 0 (the last layer's output is seen only after the final norm)."
            )
    for name in ("causal", "windows"):
        if len(getattr(config, name)) != config.num_hidden_layers:
            raise UserError(
                f"{source}: {name} has {len(getattr(config, name))} entries for {config.num_hidden_layers} layers; one per layer was expected."
            )
    if not all(isinstance(causal, bool) for causal in config.causal):
        raise UserError(
            f"{source}: causal is {list(config.causal)}; true or false was expected for every layer."
        )
    for window in config.windows:
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise UserError(f"{source}: windows has {window!r}; null or a whole number from 1 was expected.")
    if config.depth_mixing not in ("none", "shift"):
        raise UserError(f"{source}: depth_mixing is {config.depth_mixing!r}; 'none' or 'shift' was expected.")
    if config.hidden_act not in ACT2FN:
        raise UserError(
            f"{source}: hidden_act {config.hidden_act!r} is not an activation Transformers knows."
        )
    if config.head_dim % 2:
        raise UserError(
            f"{source}: head_dim {config.head_dim} is odd; rotary embeddings turn pairs, so an even size was expected."
        )
    try:
        Qwen3RotaryEmbedding(config.rotary())
    except Exception as error:
        raise UserError(
            f"{source}: rope_parameters {config.rope_parameters!r} is not a rotary embedding Transformers knows "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        ) from None
