"""`speccompile::kv_append`: write new key or value rows into a linear cache, each sequence at its own place.

    kv_append(cache [B, H, C, D], new [B, H, S, D], at [B] int64) -> cache' [B, H, C, D]

Row `s` of sequence `b` lands at cache row `at[b] + s`. The caller keeps `at[b] + S <= C`.
"""

import torch


@torch.library.custom_op("speccompile::kv_append", mutates_args=())
def kv_append(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The reference: a functional scatter along the sequence axis."""
    batch, heads, rows, size = new.shape
    index = at.view(batch, 1, 1, 1) + torch.arange(rows, device=new.device).view(1, 1, rows, 1)
    return cache.scatter(2, index.expand(batch, heads, rows, size), new)


@kv_append.register_fake
def _(cache, new, at):
    return torch.empty_like(cache)
