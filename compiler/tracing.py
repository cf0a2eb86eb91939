"""Traces models into ATen graphs whose attention is `kv_append` + `block_attention`, with no per-architecture code.

Transformers lets a caller supply the attention function and the cache. Ours hand every layer's new key and
value rows to `kv_append` and its queries to `block_attention`; everything else is traced as it is written.
"""

import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.moe import ExpertsInterface

from speccompile.compiler.draft import Draft
from speccompile.compiler.draft_config import DraftConfig
from speccompile.compiler.stages import Stage, callable_stages, flat_copy
from speccompile.export.errors import UserError
from speccompile.export.onnx import decompose, untranslatable
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.kv_append import kv_append

ATTENTION = "speccompile"
BATCH, ROWS = 3, 5  # example sizes: distinct primes, so that no two axes are taken for one

CachePair = tuple[torch.Tensor, torch.Tensor]
"""One layer's key and value cache, [B, Hkv, C, D] and [B, Hkv, C, Dv]."""


_lengths: ContextVar[torch.Tensor] = ContextVar("lengths")
"""`lengths` [B] of the step being traced; models do not all pass further arguments through to their attention."""
_MASKS = ("attention_mask", "position_bias", "alibi", "head_mask", "block_mask")


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: `key` and `value` are whole caches, as `StepCache.update` returned them."""
    unknown = [
        name
        for name, value in {"attention_mask": attention_mask, **kwargs}.items()
        if name in _MASKS and value is not None
    ]
    if unknown:
        raise UserError(
            f"The target gives its attention a {unknown[0]} of its own, which this version cannot trace; it is refused."
        )
    out = block_attention(
        query,
        key,
        value,
        _lengths.get(),
        s_aux,
        causal=True,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
    )
    return out.transpose(1, 2), None


def experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Transformers' experts interface: hidden states [T, H], chosen experts [T, k] and their weights -> [T, H].

    Every expert sees every row and unchosen ones weigh nothing. That costs arithmetic but no data-dependent shape,
    and reads each weight once, where gathering the chosen experts' weights would copy them for every row.
    """
    chosen = top_k_index[:, :, None] == torch.arange(module.num_experts, device=hidden_states.device)
    weight = (chosen * top_k_weights[:, :, None]).sum(1).t()[:, :, None]  # [E, T, 1]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        matrix = getattr(module, name)
        y = x @ (matrix if module.is_transposed else matrix.transpose(1, 2))
        return y + getattr(module, f"{name}_bias")[:, None] if module.has_bias else y

    y = project(hidden_states[None], "gate_up_proj" if module.has_gate else "up_proj")  # [E, T, 2I]
    y = project(module._apply_gate(y) if module.has_gate else module.act_fn(y), "down_proj")
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    return (y * weight).sum(0).to(hidden_states.dtype)


AttentionInterface.register(ATTENTION, attention)
ExpertsInterface.register(ATTENTION, experts)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class StepCache(Cache):
    """A Transformers cache that appends with `kv_append` and hands the whole cache to the attention function."""

    def __init__(self, caches: list[CachePair], lengths: torch.Tensor):
        super().__init__(layers=[])
        self.caches = list(caches)
        self.lengths = lengths

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> CachePair:
        key, value = self.caches[layer_idx]
        self.caches[layer_idx] = (
            kv_append(key, key_states, self.lengths),
            kv_append(value, value_states, self.lengths),
        )
        return self.caches[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.caches[0][0].shape[2], 0


@dataclass(frozen=True)
class CacheShape:
    """One layer's cache: heads and the sizes of a key and a value row."""

    heads: int
    key_size: int
    value_size: int

    def empty(self, batch: int, capacity: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            torch.zeros(batch, self.heads, capacity, size, dtype=dtype)
            for size in (self.key_size, self.value_size)
        ]


def pairs(flat: list[torch.Tensor]) -> list[CachePair]:
    """[key, value, key, value, ...] -> [(key, value), ...]"""
    return list(zip(flat[::2], flat[1::2], strict=True))


def flatten(caches: list[CachePair]) -> list[torch.Tensor]:
    return [tensor for pair in caches for tensor in pair]


def cache_shapes(model: PreTrainedModel) -> list[CacheShape]:
    """What each layer caches, found by running two tokens in eager mode.

    Raises UserError for a target whose layers keep anything but keys and values (recurrent or convolution states).
    """
    try:
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), cache=cache, use_cache=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"The {model.config.model_type!r} target does not run in Transformers with a key/value cache ({type(error).__name__}: {reason})."
        ) from None
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or getattr(layer, "conv_states", None) is not None:
            raise UserError(
                f"Layer {index} of target {model.config.model_type!r} keeps a {type(layer).__name__}; only attention "
                "layers with a key/value cache can be rolled back after a rejected proposal, so this target is not supported."
            )
        shapes.append(CacheShape(keys.shape[1], keys.shape[-1], values.shape[-1]))
    return shapes


def draft_cache_shapes(config: DraftConfig) -> list[CacheShape]:
    """What each layer of a draft caches."""
    shape = CacheShape(config.num_key_value_heads, config.head_dim, config.head_dim)
    return [shape] * config.num_hidden_layers


class _Target(nn.Module):
    """A causal LM as the step calls it. Every hidden state is an output; `tap_hidden_states` keeps what a draft needs."""

    def __init__(self, model: PreTrainedModel, max_positions: int):
        super().__init__()
        self.model = model
        self.max_positions = max_positions

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, *caches: torch.Tensor):
        cache = StepCache(pairs(list(caches)), lengths)
        _lengths.set(lengths)
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        output = self.model(
            input_ids=tokens,
            # Rows past the last position are padding; a learned position table must not be read beyond its end.
            position_ids=positions.clamp(max=self.max_positions - 1),
            cache=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        return output.logits, *output.hidden_states, *flatten(cache.caches)


class _Inject(nn.Module):
    """Tapped features [B, S, taps*H] at positions lengths + 0…S-1 -> the draft's caches with their context rows."""

    def __init__(self, draft: Draft):
        super().__init__()
        self.draft = draft

    def forward(self, features: torch.Tensor, lengths: torch.Tensor, *caches: torch.Tensor):
        positions = lengths[:, None] + torch.arange(features.shape[1], device=features.device)
        context = flatten(self.draft.inject(features, positions))
        return tuple(kv_append(cache, rows, lengths) for cache, rows in zip(caches, context, strict=True))


class _Propose(nn.Module):
    """Anchor tokens [B] at positions [B] -> proposals [B, K-1] and the draft's caches, block rows included."""

    def __init__(self, draft: Draft, width: int):
        super().__init__()
        self.draft = draft
        self.width = width

    def forward(self, anchor: torch.Tensor, at: torch.Tensor, *caches: torch.Tensor):
        config, caches = self.draft.config, pairs(list(caches))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            caches[layer] = kv_append(caches[layer][0], k, at), kv_append(caches[layer][1], v, at)
            return block_attention(
                q,
                *caches[layer],
                at,
                causal=config.causal[layer],
                scale=config.head_dim**-0.5,
                window=config.windows[layer],
            )

        positions = at[:, None] + torch.arange(self.width, device=at.device)
        return self.draft.propose(anchor, positions, attend), *flatten(caches)


def freeze_rope(model: PreTrainedModel, max_positions: int) -> None:
    """Fix rotary embeddings that change their frequencies with the longest position they see (dynamic, longrope).

    Up to the original context they do not change; raises UserError for an engine that would go beyond it.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        named = kinds if isinstance(kinds, dict) else {"": kinds}
        changing = {
            key
            for key, kind in named.items()
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
        }
        if not changing:
            continue
        parameters = module.config.rope_parameters
        original = parameters.get("original_max_position_embeddings") or module.config.max_position_embeddings
        if max_positions > original:
            raise UserError(
                f"The target's rotary embedding ({parameters['rope_type']}) changes its frequencies past {original} positions, which one "
                f"graph cannot; give --max-seq-len {original} or less."
            )
        module.rope_type = (
            {k: "default" if k in changing else v for k, v in named.items()}
            if isinstance(kinds, dict)
            else "default"
        )


def _trace(name: str, module: nn.Module, example: tuple, rows: bool, output_shapes) -> Stage:
    """Export with a dynamic batch and, if `rows`, a dynamic axis 1 of the first input."""
    batch = torch.export.Dim.DYNAMIC
    first = {0: batch, 1: torch.export.Dim.DYNAMIC} if rows else {0: batch}
    shapes = (first, {0: batch}, tuple({0: batch} for _ in example[2:]))
    try:
        program = torch.export.export(module.eval(), example, dynamic_shapes=shapes, strict=False)
    except UserError:
        raise
    except Exception as error:
        if os.environ.get("SPECCOMPILE_DEBUG") == "1":
            raise
        raise UserError(
            f"The {name} could not be traced by torch.export ({type(error).__name__}: {str(error).strip().splitlines()[0][:200]}); "
            "SPECCOMPILE_DEBUG=1 shows where."
        ) from None
    if untranslatable(program.graph):
        program = decompose(program)
    return Stage(name, flat_copy(program.module(check_guards=False)), output_shapes)


def trace_target(
    model: PreTrainedModel, shapes: list[CacheShape], capacity: int, max_positions: int
) -> Stage:
    """`(tokens [B, S], lengths [B], caches) -> logits [B, S, V], hidden_states[0…L] [B, S, H], caches`"""
    freeze_rope(model, max_positions)
    model.set_attn_implementation(ATTENTION)
    model.config._experts_implementation = ATTENTION  # read by mixture-of-experts layers only
    config = model.config.get_text_config()
    caches = [tensor for shape in shapes for tensor in shape.empty(BATCH, capacity, model.dtype)]
    example = (torch.zeros(BATCH, ROWS, dtype=torch.long), torch.zeros(BATCH, dtype=torch.long), *caches)
    vocabulary = model.get_output_embeddings().weight.shape[0]

    def output_shapes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        tokens, _, *caches = inputs
        leading = tokens.shape
        hidden = [
            caches[0].new_empty(*leading, config.hidden_size) for _ in range(config.num_hidden_layers + 1)
        ]
        return [caches[0].new_empty(*leading, vocabulary), *hidden, *(torch.empty_like(c) for c in caches)]

    return _trace("target", _Target(model, max_positions), example, True, output_shapes)


def trace_draft(draft: Draft, width: int, capacity: int, dtype: torch.dtype) -> tuple[Stage, Stage]:
    """The draft's two stages, inject and propose, at block width `width`."""
    config = draft.config
    caches = [
        tensor for shape in draft_cache_shapes(config) for tensor in shape.empty(BATCH, capacity, dtype)
    ]
    at = torch.zeros(BATCH, dtype=torch.long)
    features = torch.zeros(BATCH, ROWS, len(config.target_layer_ids) * config.hidden_size, dtype=dtype)
    inject = _trace(
        "inject",
        _Inject(draft),
        (features, at, *caches),
        True,
        lambda inputs: [torch.empty_like(c) for c in inputs[2:]],
    )
    propose = _trace(
        "propose",
        _Propose(draft, width),
        (at, at.clone(), *caches),
        False,
        lambda inputs: [
            inputs[0].new_empty(inputs[0].shape[0], width - 1),
            *map(torch.empty_like, inputs[2:]),
        ],
    )
    return inject, propose


def trace_step(
    step: nn.Module, stages: list[Stage], target_caches: list[torch.Tensor], draft_caches: list[torch.Tensor]
) -> fx.GraphModule:
    """Export the step's own few dozen operations, with every stage as one call."""
    batch = {0: torch.export.Dim.DYNAMIC}
    vector = torch.zeros(BATCH, dtype=torch.long)
    example = (
        torch.zeros(BATCH, ROWS, dtype=torch.long),
        vector,
        vector.clone(),
        vector.clone(),
        target_caches,
        draft_caches,
    )
    shapes = (
        {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},
        batch,
        batch,
        batch,
        [batch] * len(target_caches),
        [batch] * len(draft_caches),
    )
    with callable_stages(*stages):
        program = torch.export.export(step, example, dynamic_shapes=shapes, strict=False)
    return flat_copy(program.module(check_guards=False))
