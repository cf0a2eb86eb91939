"""`speccompile::block_attention`: the rows of one block attend to the valid rows of a linear cache.

    block_attention(q [B, Hq, S, D], key_cache [B, Hkv, C, D], value_cache [B, Hkv, C, Dv], q_at [B] int64,
                    sinks [Hq] | None, *, causal, scale, window=None, softcap=None) -> [B, Hq, S, Dv]

The block's own keys and values are already in the cache; row `s` of sequence `b` sits at position
`q_at[b] + s`. With `causal` it sees positions up to its own, otherwise all up to the end of the block,
`q_at[b] + S - 1`. `window` W keeps keys closer than W positions on either side (a causal row has only the
left one). `Hq` is a multiple of `Hkv` (grouped-query attention). `sinks` are per-head logits that join the
softmax denominator only (gpt-oss).
"""

import torch


def visible_rows(
    q_at: torch.Tensor, rows: int, capacity: int, causal: bool, window: int | None
) -> torch.Tensor:
    """Bool mask [B, S, C]: which cache rows each block row may see."""
    position = q_at[:, None] + torch.arange(rows, device=q_at.device)
    key = torch.arange(capacity, device=q_at.device)
    last = position if causal else (q_at + rows - 1)[:, None].expand_as(position)
    mask = key[None, None, :] <= last[:, :, None]
    if window is not None:
        mask = mask & (position[:, :, None] - key[None, None, :] < window)
        if not causal:
            mask = mask & (key[None, None, :] - position[:, :, None] < window)
    return mask


@torch.library.custom_op("speccompile::block_attention", mutates_args=())
def block_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_at: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The reference, written as softmax over the whole capacity with a mask."""
    groups = q.shape[1] // key_cache.shape[1]
    key = key_cache.repeat_interleave(groups, dim=1)
    value = value_cache.repeat_interleave(groups, dim=1)
    scores = (q @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible_rows(q_at, q.shape[2], key.shape[2], causal, window)[:, None]
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(value.dtype) @ value


@block_attention.register_fake
def _(q, key_cache, value_cache, q_at, sinks=None, *, causal, scale, window=None, softcap=None):
    return q.new_empty(*q.shape[:3], value_cache.shape[-1])
