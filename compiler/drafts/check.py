"""What no draft may contradict, in itself and against its target: one sentence naming the file and the key."""

from dataclasses import fields
from pathlib import Path

from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from speccompile.compiler.drafts import config as forms
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.export.errors import UserError

_CHOICES = {
    "backbone": forms.BACKBONES,
    "layout": forms.LAYOUTS,
    "depth_mixing": forms.MIXINGS,
    "head": forms.HEADS,
    "tap_norms": forms.TAP_NORMS,
    "confidence": forms.CONFIDENCES,
}
_LARGEST = 2**24
_MAY_BE_ZERO = {"head_prefix", "mask_token_id"}
_NEEDS = {
    "markov": ("head_rank",), "markov_gated": ("head_rank",), "markov_rnn": ("head_rank",),
    "gru": ("head_rank", "head_state_size"), "selector": ("head_rank", "head_candidates"),
    "jacobi": ("head_rank", "head_mlp_ratio", "head_passes"), "convolution": ("conv_kernel_size", "conv_group_size"),
}  # fmt: skip


def check_config(c: DraftConfig, source: Path) -> None:
    """Raises UserError for a configuration that cannot be. Types first: a string for a number is named, not crashed on."""
    for field in fields(DraftConfig):
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        _check_type(field.name, kind, getattr(c, field.name), source)
    for name, allowed in _CHOICES.items():
        if getattr(c, name) not in allowed:
            raise UserError(
                f"{source}: {name} is {getattr(c, name)!r}; one of {', '.join(allowed)} was expected."
            )
    for name in ("causal", "windows"):
        if len(getattr(c, name)) != c.num_hidden_layers:
            raise UserError(
                f"{source}: {name} has {len(getattr(c, name))} entries for {c.num_hidden_layers} layers; one per layer was expected."
            )
    for kind in (c.head, c.depth_mixing):
        for name in _NEEDS.get(kind, ()):
            if getattr(c, name) is None:
                raise UserError(
                    f"{source} lacks {name}, which {kind} needs; add the value the draft was trained with."
                )
    _check_sizes(c, source)
    _check_taps(c, source)
    if c.backbone == "block":
        _check_block(c, source)
    try:
        Qwen3RotaryEmbedding(c.rotary())
    except Exception as error:
        raise UserError(
            f"{source}: rope_parameters {c.rope_parameters!r} is not a rotary embedding Transformers knows "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})."
        ) from None


def _check_type(name: str, kind: str, value: object, source: Path) -> None:
    if value is None and "None" in kind:
        return
    if kind.startswith("tuple"):
        wanted = bool if "bool" in kind else int
        for entry in value:
            if entry is None and "None" in kind:
                continue
            if not isinstance(entry, wanted) or (wanted is int and isinstance(entry, bool)):
                raise UserError(
                    f"{source}: {name} is {list(value)!r}; a list of {'true/false' if wanted is bool else 'whole numbers'} was expected."
                )
            if name == "windows" and entry < 1:
                raise UserError(f"{source}: windows has {entry}; null or a whole number from 1 was expected.")
    elif kind.startswith("bool"):
        if not isinstance(value, bool):
            raise UserError(f"{source}: {name} is {value!r}; true or false was expected.")
    elif kind.startswith("int"):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{source}: {name} is {value!r}; a whole number was expected.")
        if value < (0 if name in _MAY_BE_ZERO else 1):
            raise UserError(
                f"{source}: {name} is {value}; at least {0 if name in _MAY_BE_ZERO else 1} was expected."
            )
        if value > _LARGEST and name != "mask_token_id":
            raise UserError(f"{source}: {name} is {value}; no draft has more than {_LARGEST}.")
    elif kind.startswith("float"):
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{source}: {name} is {value!r}; a number was expected.")
    elif kind.startswith("dict") and not isinstance(value, dict):
        raise UserError(f"{source}: {name} is {value!r}; an object was expected.")
    elif kind == "str" and not isinstance(value, str):
        raise UserError(f"{source}: {name} is {value!r}; a word was expected.")


def _check_sizes(c: DraftConfig, source: Path) -> None:
    if c.rms_norm_eps <= 0:
        raise UserError(f"{source}: rms_norm_eps is {c.rms_norm_eps}; a number above 0 was expected.")
    if c.num_attention_heads % c.num_key_value_heads:
        raise UserError(
            f"{source}: num_attention_heads {c.num_attention_heads} is not a multiple of num_key_value_heads {c.num_key_value_heads}."
        )
    if c.head_dim % 2:
        raise UserError(
            f"{source}: head_dim {c.head_dim} is odd; rotary embeddings turn pairs, so an even size was expected."
        )
    if c.hidden_act not in ACT2FN:
        raise UserError(f"{source}: hidden_act {c.hidden_act!r} is not an activation Transformers knows.")
    if c.head_rows > c.vocab_size:
        raise UserError(
            f"{source}: draft_vocab_size {c.draft_vocab_size} is more than the vocabulary of {c.vocab_size} tokens."
        )
    if c.draft_vocab_size and not c.own_head:
        raise UserError(
            f"{source}: draft_vocab_size {c.draft_vocab_size} is a reduced vocabulary of {c.vocab_size}, but the checkpoint holds no lm_head.weight "
            "of its own; the target's head has other rows, so the checkpoint is not complete."
        )
    if c.block_width < 2:
        raise UserError(
            f"{source}: block width {c.block_width} leaves no row to propose with; at least 2 was expected."
        )
    if c.target_hidden_size not in (None, c.hidden_size) and not (c.own_embedding and c.own_head):
        raise UserError(
            f"{source}: the draft is {c.hidden_size} wide and its target {c.target_hidden_size}, so it cannot use the target's embedding and head, "
            "but it does not bring both of its own."
        )


def _check_taps(c: DraftConfig, source: Path) -> None:
    if not c.tapped_hidden_states:
        raise UserError(f"{source}: no target layer is tapped; at least one must be.")
    for state in c.tapped_hidden_states:
        if not 0 <= state < c.num_target_layers:
            raise UserError(
                f"{source}: a tap of hidden_states[{state}] (the output of decoder layer {state - 1}) was asked for; 0 to {c.num_target_layers - 1} can be "
                f"tapped of a {c.num_target_layers}-layer target (the last layer's output is seen only after the final norm)."
            )


def _check_block(c: DraftConfig, source: Path) -> None:
    if c.mask_token_id is None:
        raise UserError(
            f"{source} lacks mask_token_id; nothing is guessed, so add the value the draft was trained with."
        )
    if not 0 <= c.mask_token_id < c.vocab_size:
        raise UserError(
            f"{source}: mask_token_id {c.mask_token_id} is outside the vocabulary of {c.vocab_size} tokens."
        )
    if c.depth_mixing == "convolution":
        if c.hidden_size % c.conv_group_size:
            raise UserError(
                f"{source}: hidden_size {c.hidden_size} is not a multiple of conv_group_size {c.conv_group_size}."
            )
        if c.conv_kernel_size > c.block_width:
            raise UserError(
                f"{source}: conv_kernel_size {c.conv_kernel_size} is wider than the block of {c.block_width} rows."
            )
    if c.head_candidates is not None and c.head_candidates > c.head_rows:
        raise UserError(
            f"{source}: {c.head_candidates} candidates a row are more than the draft's vocabulary of {c.head_rows} tokens."
        )
    if c.confidence == "hidden_and_previous" and not c.head.startswith("markov"):
        raise UserError(
            f"{source}: the confidence head reads the Markov head's embeddings, but there is no Markov head."
        )


def check_target(c: DraftConfig, hidden_size: int, vocab_size: int, layers: int, source: Path) -> None:
    """Raises UserError if the draft was made for another target than one of these sizes."""
    for what, found, wanted in (
        ("hidden_size", c.target_hidden_size or c.hidden_size, hidden_size),
        ("num_target_layers", c.num_target_layers, layers),
    ):
        if found != wanted:
            raise UserError(
                f"{source}: the draft was made for a target with {what} {found}, but this target has {wanted}; pair it with its own target."
            )
    if c.vocab_size != vocab_size and not _padded(*sorted((c.vocab_size, vocab_size))):
        raise UserError(
            f"{source}: the draft was made for a target with vocab_size {c.vocab_size}, but this target has {vocab_size}; pair it with its own target."
        )
    if c.mask_token_id is not None and c.mask_token_id >= vocab_size:
        raise UserError(
            f"{source}: mask_token_id {c.mask_token_id} is outside the target's embedding of {vocab_size} rows."
        )


def _padded(small: int, large: int) -> bool:
    """Whether `large` is `small` rounded up to a multiple of 64, 128, 256 or 512, as checkpoints pad vocabularies."""
    return any(-(-small // step) * step == large for step in (64, 128, 256, 512))
