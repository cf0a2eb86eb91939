"""Traces models into ATen graphs whose attention is `kv_append` + `block_attention`, with no per-architecture code.

Transformers lets a caller supply the attention function and the cache. Ours hand every layer's new key and
value rows to `kv_append` and its queries to `block_attention`; everything else is traced as it is written.
"""

import inspect
import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.moe import ExpertsInterface

from speccompile.compiler.drafts.block import BlockDraft
from speccompile.compiler.drafts.chain import ChainDraft
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.parts import Draft
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


class _Cached:
    """The draft's caches during one pass: `attend` appends a layer's new rows at `at` and attends over them."""

    def __init__(self, config: DraftConfig, caches: tuple[torch.Tensor, ...], at: torch.Tensor):
        self.config, self.caches, self.at = config, pairs(list(caches)), at

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        key, value = self.caches[layer]
        self.caches[layer] = kv_append(key, k, self.at), kv_append(value, v, self.at)
        return block_attention(
            q,
            *self.caches[layer],
            self.at,
            sinks,
            causal=self.config.causal[layer],
            scale=self.config.head_dim**-0.5,
            window=self.config.windows[layer],
        )


def _positions(at: torch.Tensor, rows: int) -> torch.Tensor:
    return at[:, None] + torch.arange(rows, device=at.device)


class _Inject(nn.Module):
    """Tapped features [B, S, taps*H] at positions lengths + 0…S-1 -> the draft's caches with their context rows."""

    def __init__(self, draft: BlockDraft):
        super().__init__()
        self.draft = draft

    def forward(self, features: torch.Tensor, lengths: torch.Tensor, *caches: torch.Tensor):
        context = flatten(self.draft.inject(features, _positions(lengths, features.shape[1])))
        return tuple(kv_append(cache, rows, lengths) for cache, rows in zip(caches, context, strict=True))


class _Propose(nn.Module):
    """Anchor tokens [B] at positions [B], the tokens before them [B] -> proposals [B, K-1], their confidences if the
    draft predicts any, and the draft's caches, block rows included."""

    def __init__(self, draft: BlockDraft, width: int):
        super().__init__()
        self.draft = draft
        self.width = width

    def forward(self, anchor: torch.Tensor, before: torch.Tensor, at: torch.Tensor, *caches: torch.Tensor):
        cached = _Cached(self.draft.config, caches, at)
        positions = _positions(at, self.draft.config.rows(self.width))
        proposals, confidence = self.draft.propose(anchor, before, positions, self.width, cached.attend)
        return proposals, *([] if confidence is None else [confidence]), *flatten(cached.caches)


class _Extend(nn.Module):
    """A chain's inject: features [B, S, taps*H], the token after each row [B, S], the last committed row [B] -> its
    hidden state [B, H], and the caches with rows of every token."""

    def __init__(self, draft: ChainDraft):
        super().__init__()
        self.draft = draft

    def forward(
        self,
        features: torch.Tensor,
        following: torch.Tensor,
        last: torch.Tensor,
        lengths: torch.Tensor,
        *caches: torch.Tensor,
    ):
        cached = _Cached(self.draft.config, caches, lengths)
        positions = _positions(lengths, features.shape[1])
        hidden = self.draft.hidden(self.draft.project(features), following, positions, cached.attend)
        row = last.clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, row)[:, 0], *flatten(cached.caches)


class _Chain(nn.Module):
    """The last committed row's hidden state [B, H], committed tokens [B] -> proposals [B, K-1] and the draft's caches."""

    def __init__(self, draft: ChainDraft, width: int):
        super().__init__()
        self.draft = draft
        self.width = width

    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor, *caches: torch.Tensor):
        token, feature = self.draft.choose(hidden[:, None])
        proposals = [token]
        for row in range(self.width - 2):
            cached = _Cached(self.draft.config, caches, lengths + row)
            row_hidden = self.draft.hidden(feature, token[:, None], cached.at[:, None], cached.attend)
            caches = flatten(cached.caches)
            token, feature = self.draft.choose(row_hidden)
            proposals.append(token)
        return torch.stack(proposals, dim=1), *caches


def freeze_rope(model: nn.Module, max_positions: int, owner: str = "target") -> None:
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
                f"The {owner}'s rotary embedding ({parameters['rope_type']}) changes its frequencies past {original} positions, which one "
                f"graph cannot; give --max-seq-len {original} or less."
            )
        module.rope_type = (
            {k: "default" if k in changing else v for k, v in named.items()}
            if isinstance(kinds, dict)
            else "default"
        )


def _export(module: nn.Module, example: tuple, shapes: Any) -> torch.export.ExportedProgram:
    # Hashing every call's arguments for the cache of fake results costs more than computing those results again.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        return torch.export.export(module, example, dynamic_shapes=shapes, strict=False)


def _trace(name: str, module: nn.Module, example: tuple, rows: int, output_shapes) -> Stage:
    """Export with a dynamic batch and a dynamic axis 1 of the first `rows` inputs."""
    dynamic = torch.export.Dim.DYNAMIC
    shapes = [
        {0: dynamic, 1: dynamic} if position < rows else {0: dynamic} for position in range(len(example))
    ]
    names = list(inspect.signature(module.forward).parameters)[:-1]  # the last takes all caches
    shapes = (*shapes[: len(names)], tuple(shapes[len(names) :]))
    try:
        program = _export(module.eval(), example, shapes)
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

    return _trace("target", _Target(model, max_positions), example, 1, output_shapes)


def trace_draft(
    draft: Draft, width: int, capacity: int, dtype: torch.dtype, max_positions: int
) -> tuple[Stage, Stage]:
    """The draft's two stages, inject and propose, at block width `width`."""
    freeze_rope(draft, max_positions, "draft")
    config = draft.config
    caches = [
        tensor for shape in draft_cache_shapes(config) for tensor in shape.empty(BATCH, capacity, dtype)
    ]
    at = torch.zeros(BATCH, dtype=torch.long)
    features = torch.zeros(BATCH, ROWS, config.feature_size, dtype=dtype)
    if isinstance(draft, ChainDraft):
        inject_module, propose_module = _Extend(draft), _Chain(draft, width)
        inject_example = (features, torch.zeros(BATCH, ROWS, dtype=torch.long), at, at.clone(), *caches)
        propose_example = (torch.zeros(BATCH, config.hidden_size, dtype=dtype), at, *caches)
    else:
        inject_module, propose_module = _Inject(draft), _Propose(draft, width)
        inject_example = (features, at, *caches)
        propose_example = (at, at.clone(), at.clone(), *caches)
    confident = config.confidence != "none"

    def inject_shapes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        caches = [torch.empty_like(c) for c in inputs[len(inject_example) - 2 * config.num_hidden_layers :]]
        is_chain = config.backbone == "chain"
        return [inputs[0].new_empty(inputs[0].shape[0], config.hidden_size), *caches] if is_chain else caches

    def propose_shapes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        at, *caches = inputs[len(propose_example) - 2 * config.num_hidden_layers - 1 :]
        proposals = at.new_empty(at.shape[0], width - 1)
        confidence = [caches[0].new_empty(at.shape[0], width - 1, dtype=torch.float32)] if confident else []
        return [proposals, *confidence, *map(torch.empty_like, caches)]

    rows = 2 if isinstance(draft, ChainDraft) else 1
    inject = _trace("inject", inject_module, inject_example, rows, inject_shapes)
    return inject, _trace("propose", propose_module, propose_example, 0, propose_shapes)


def sampling_example(width: int) -> list[torch.Tensor]:
    """What `SAMPLING_INPUTS` name."""
    real = torch.zeros(BATCH)
    return [real, real.long(), real + 1, real.clone(), torch.zeros(BATCH, width)]


def trace_step(
    step: nn.Module,
    stages: list[Stage],
    target_caches: list[torch.Tensor],
    draft_caches: list[torch.Tensor],
    chain: bool = False,
    sampling: bool = False,
    width: int = 1,
) -> fx.GraphModule:
    """Export the step's own few dozen operations, with every stage as one call."""
    dynamic = torch.export.Dim.DYNAMIC
    batch = {0: dynamic}
    vectors = [torch.zeros(BATCH, dtype=torch.long) for _ in range(4)]
    example = (
        torch.zeros(BATCH, ROWS, dtype=torch.long),
        *vectors[:3],
        target_caches,
        draft_caches,
        [vectors[3]] * chain + sampling_example(width) * sampling,
    )
    shapes = (
        {0: dynamic, 1: dynamic},
        batch,
        batch,
        batch,
        [batch] * len(target_caches),
        [batch] * len(draft_caches),
        [batch] * (chain + 5 * sampling),
    )
    with callable_stages(*stages):
        program = _export(step, example, shapes)
    return flat_copy(program.module(check_guards=False))
