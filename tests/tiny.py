"""Tiny random-weight targets and drafts of many shapes, saved as the checkpoints a user would hand in."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speccompile.compiler import checkpoint
from speccompile.compiler.init_draft import random_draft

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 12, "head_dim": 8},
    "gemma2": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gpt2": {},
    "cohere2": {"head_dim": 8, "sliding_window": 12},
    "starcoder2": {},
    "nemotron": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 12},
}


# One random draft of every family, as fields of our own configuration over `random_draft`'s.
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"family": "dflash"},
    "causal-depth": {"family": "causal-depth"},
    "jetspec": {"family": "dflash", "causal": (True, True)},
    "dflash2": {
        "family": "dflash", "depth_mixing": "convolution", "conv_kernel_size": 2, "conv_group_size": 8, "head": "selector",
        "head_rank": 6, "head_candidates": 4, "windows": (9, 9),
    },
    "dspark": {"family": "dflash", "layout": "anchor_first", "head": "markov_rnn", "head_rank": 6, "confidence": "hidden_and_previous"},
    "domino": {"family": "dflash", "layout": "anchor_first_full", "head": "gru", "head_rank": 6, "head_state_size": 5, "head_prefix": 1},
    "xpress": {"family": "dflash", "head": "jacobi", "head_rank": 6, "head_mlp_ratio": 2, "head_passes": 2},
    "eagle3": {"family": "dflash", "backbone": "chain", "qk_norm": False, "causal": (True, True), "own_embedding": True, "own_head": True},
}  # fmt: skip


def save_target(path: Path, model_type: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A random target with weights wide enough that its greedy text is varied, as config.json and model.safetensors."""
    config = AutoConfig.for_model(model_type, **(SIZES | ARCHITECTURES.get(model_type, {}) | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" not in name and "ln_" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return path


def save_draft(path: Path, target: Path, seed: int = 1, std: float = 0.2, **options: Any) -> Path:
    """A random draft for a target, in our dialect. `options` are `random_draft`'s, and any field of the configuration."""
    import dataclasses

    from speccompile.compiler.drafts.config import DraftConfig
    from speccompile.compiler.drafts.loading import empty_draft, save_draft

    fields = {f.name for f in dataclasses.fields(DraftConfig)}
    d2t = options.pop("d2t", None)
    overrides = {
        k: options.pop(k) for k in list(options) if k in fields and k not in ("block_width", "mask_token_id")
    }
    arguments = dict(family="dflash", layers=2, block_width=4, mask_token_id=None, seed=seed) | options
    config = random_draft(checkpoint.target_config(target), **arguments).config
    torch.manual_seed(seed)
    config = dataclasses.replace(config, **overrides)
    if config.backbone == "chain":
        config = dataclasses.replace(config, mask_token_id=None)
    draft = empty_draft(config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    if d2t is not None:
        draft.d2t = torch.tensor(d2t) - torch.arange(len(d2t))
    path.mkdir(parents=True, exist_ok=True)
    save_draft(draft, path)
    return path


def zlab(path: Path) -> dict[str, Any]:
    """A saved DFlash draft's configuration in z-lab's dialect."""
    ours = json.loads((path / "config.json").read_text())
    kept = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
        "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "rope_parameters", "num_target_layers",
    )  # fmt: skip
    nested = {
        "mask_token_id": ours["mask_token_id"],
        "target_layer_ids": [i - 1 for i in ours["tapped_hidden_states"]],
        "block_size": ours["block_width"],
    } | {
        k: ours[k]
        for k in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
        if ours[k]
    }
    sliding = [w is not None for w in ours["windows"]]
    config = {k: ours[k] for k in kept} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": nested,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": next((w for w in ours["windows"] if w), None),
        "use_sliding_window": any(sliding),
    }
    if ours["causal"] != sliding:
        config["is_causal"] = ours["causal"][0]
    return config
