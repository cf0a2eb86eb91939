"""`speccompile::group_query_attention`: ONNX Runtime's fused cache append and attention, as an ATen-level op.

    group_query_attention(q [B, S, Hq*D], k [B, S, Hkv*D], v [B, S, Hkv*D],
                          past_key [B, Hkv, C, D], past_value [B, Hkv, C, D],
                          last [B] int32, longest [] int32, added [B] int32, sinks [Hq] | None,
                          *, num_heads, kv_num_heads, scale, window=None, softcap=None)
        -> (out [B, S, Hq*D], present_key, present_value)

It means `kv_append` of k and v at `at = last + 1 - added`, then causal `block_attention` of q at `at`; `last + 1` is
a sequence's length afterwards, `longest` the greatest of them, and `added` is S for every sequence. It becomes
the node `com.microsoft::GroupQueryAttention`, which writes in place and reads valid rows only when past and
present are bound to one buffer.
"""

import torch

from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.kv_append import kv_append


def split_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, S, H*D] -> [B, H, S, D]"""
    return rows.reshape(rows.shape[0], rows.shape[1], heads, -1).transpose(1, 2)


@torch.library.custom_op("speccompile::group_query_attention", mutates_args=())
def group_query_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    last: torch.Tensor,
    longest: torch.Tensor,
    added: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference: the two IR ops one after the other."""
    at = (last + 1 - added).to(torch.int64)
    key = kv_append(past_key, split_heads(k, kv_num_heads), at)
    value = kv_append(past_value, split_heads(v, kv_num_heads), at)
    out = block_attention(
        split_heads(q, num_heads), key, value, at, sinks, causal=True, scale=scale, window=window, softcap=softcap
    )  # fmt: skip
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1).contiguous(), key, value


@group_query_attention.register_fake
def _(
    q, k, v, past_key, past_value, last, longest, added, sinks=None,
    *, num_heads, kv_num_heads, scale, window=None, softcap=None,
):  # fmt: skip
    return torch.empty_like(q), torch.empty_like(past_key), torch.empty_like(past_value)
