"""Checks a traced target before anything is built on it: that attention went our way, and that it computes the same.

A model that attends with code of its own, or masks in a way our operations do not know, would trace without
complaint and give another text. It is refused here.
"""

import torch
from torch import fx
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from speccompile.compiler.stages import Stage
from speccompile.compiler.tracing import CacheShape
from speccompile.export.errors import UserError
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.kv_append import kv_append

TOKENS = 48
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Largest difference of a logit, as a share of the largest logit: reassociated sums, no more."""


def chunks(model: PreTrainedModel, max_seq_len: int) -> list[torch.Tensor]:
    """Pseudo-random tokens [1, n] and [1, m]: a prompt, and what continues it over the cache."""
    count = max(2, min(TOKENS, max_seq_len))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (1, count), generator=torch.Generator().manual_seed(0))
    return (
        list(tokens.split([count - count // 3, count // 3], dim=1))
        if count >= 3
        else list(tokens.split(1, dim=1))
    )


def eager_logits(model: PreTrainedModel, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Transformers' own logits [1, rows, V] for each chunk, with its own cache and eager attention."""
    cache = DynamicCache(config=model.config)
    return [model(input_ids=part, cache=cache, use_cache=True).logits for part in parts]


def check_target(
    target: Stage,
    config: PretrainedConfig,
    shapes: list[CacheShape],
    parts: list[torch.Tensor],
    expected: list[torch.Tensor],
) -> None:
    """Raises UserError if the traced target is not the model that gave `expected` for `parts`."""
    _check_attention(target.graph_module, config)
    capacity = sum(part.shape[1] for part in parts)
    dtype = expected[0].dtype
    caches = [tensor for shape in shapes for tensor in shape.empty(1, capacity, dtype)]
    length = torch.zeros(1, dtype=torch.long)
    for part, wanted in zip(parts, expected, strict=True):
        logits, *outputs = target.graph_module(part, length, *caches)
        caches = outputs[-len(caches) :]
        length = length + part.shape[1]
        worst = (logits.float() - wanted.float()).abs().max().item()
        limit = TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())
        if not worst <= limit:  # a NaN is no agreement
            raise UserError(
                f"The traced {config.model_type!r} target disagrees with Transformers' eager mode: a logit differs by {worst:.3g}, "
                f"at most {limit:.3g} was expected. It attends or masks in a way that this version cannot trace, so it is refused."
            )


def _check_attention(graph_module: fx.GraphModule, config: PretrainedConfig) -> None:
    appends, attentions = (
        [n for n in graph_module.graph.nodes if n.target is op._opoverload]
        for op in (kv_append, block_attention)
    )
    for append in appends:
        strangers = [
            u for u in append.users if u.op != "output" and u.target is not block_attention._opoverload
        ]
        if strangers or not append.users:
            raise UserError(
                f"The {config.model_type!r} target attends with code of its own instead of Transformers' attention interface "
                f"({strangers[0].target if strangers else 'a cache is never read'}), so its attention cannot be fused; it is refused."
            )
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"The {config.model_type!r} target has layers of {unknown[0]}; full and sliding attention are supported."
        )
    windowed = sum(n.kwargs.get("window") is not None for n in attentions)
    if kinds and windowed != kinds.count("sliding_attention"):
        raise UserError(
            f"The {config.model_type!r} target names {kinds.count('sliding_attention')} layers of sliding attention, but {windowed} were "
            "traced with a window; it would see another context than in Transformers, so it is refused."
        )
