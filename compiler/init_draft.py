"""A random-weight draft for any target, so that a pair can be built before one is trained."""

import torch
from transformers import PretrainedConfig

from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.loading import empty_draft
from speccompile.compiler.drafts.parts import Draft
from speccompile.export.errors import UserError

FAMILIES = ("causal-depth", "dflash")


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """z-lab's spread of taps over the target's depth (its `build_target_layer_ids`); needs a target of 4 layers."""
    if draft_layers == 1 or target_layers < 4:
        return (min(target_layers // 2, target_layers - 2),)
    return tuple(round(1 + j * (target_layers - 4) / (draft_layers - 1)) for j in range(draft_layers))


def random_draft(
    target: PretrainedConfig, family: str, layers: int, block_width: int, mask_token_id: int | None, seed: int
) -> Draft:
    """A draft with the target's sizes. Raises UserError for a family or size that cannot be."""
    text = target.get_text_config()
    if family not in FAMILIES:
        raise UserError(f"--family {family} is not known; choose one of: {', '.join(FAMILIES)}.")
    if text.num_hidden_layers < 2:
        raise UserError("The target has one layer, so there is no hidden state before its last layer to tap.")
    if layers < 1 or block_width < 2:
        raise UserError(
            f"--layers {layers} and --block-width {block_width} were given; at least 1 and 2 are needed."
        )
    mask = text.vocab_size - 1 if mask_token_id is None else mask_token_id
    if not 0 <= mask < text.vocab_size:
        raise UserError(
            f"--mask-token-id {mask} is outside the target's vocabulary of {text.vocab_size} tokens."
        )
    heads = text.num_attention_heads
    causal = family == "causal-depth"
    config = DraftConfig(
        hidden_size=text.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocab_size=text.vocab_size,
        num_target_layers=text.num_hidden_layers,
        tapped_hidden_states=tuple(i + 1 for i in default_layer_ids(text.num_hidden_layers, layers)),
        mask_token_id=mask,
        block_width=block_width,
        causal=(causal,) * layers,
        windows=(None,) * layers,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        depth_mixing="shift" if causal else "none",
    )
    torch.manual_seed(seed)
    draft = empty_draft(config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return draft
