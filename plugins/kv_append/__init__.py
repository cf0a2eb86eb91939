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


@torch.library.custom_op("speccompile::kv_append_pair", mutates_args=())
def kv_append_pair(
    cache: torch.Tensor, first: torch.Tensor, at: torch.Tensor, second: torch.Tensor, second_at: torch.Tensor
) -> torch.Tensor:
    """`kv_append(kv_append(cache, first, at), second, second_at)` in one update of S1 + S2 rows, for runtimes that take
    one per cache and step. Needs at <= second_at <= at + S1 and at + S1 + S2 <= C; rows from second_at + S2 on are
    left with anything."""
    offset = (second_at - at)[:, None]
    row = torch.arange(first.shape[2] + second.shape[2], device=at.device)
    pick = torch.where(row < offset, row, first.shape[2] + (row - offset).clamp(max=second.shape[2] - 1))
    both = torch.cat([first, second], dim=2)
    return kv_append(cache, both.gather(2, pick[:, None, :, None].expand_as(both)), at)


@kv_append_pair.register_fake
def _(cache, first, at, second, second_at):
    return torch.empty_like(cache)


@torch.library.custom_op("speccompile::kv_append_", mutates_args=("cache",))
def kv_append_(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> None:
    """`kv_append` into the cache itself."""
    batch, heads, rows, size = new.shape
    index = at.view(batch, 1, 1, 1) + torch.arange(rows, device=new.device).view(1, 1, rows, 1)
    cache.scatter_(2, index.expand(batch, heads, rows, size), new)


@kv_append_.register_fake
def _(cache, new, at):
    return None
