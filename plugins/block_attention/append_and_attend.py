"""The op of the torch back end: a block's new keys and values into the caches, in place, and attention over the valid rows.

    append_and_attend(q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], key_cache [B, Hkv, C, D],
                      value_cache [B, Hkv, C, Dv], at [B] int64, sinks [Hq] | None,
                      *, causal, scale, window=None, softcap=None) -> [B, Hq, S, Dv]

is `kv_append` of k and v at `at`, written into the caches themselves, then `block_attention` at `at`. On CUDA it is the
Triton kernel of `kernel.py`; elsewhere PyTorch's scaled-dot-product attention over the longest sequence's rows.
"""

import torch

from speccompile.plugins.block_attention import block_attention, visible_rows
from speccompile.plugins.kv_append import kv_append_

LARGEST_HEAD = 256


@torch.library.custom_op(
    "speccompile::append_and_attend", mutates_args=("key_cache", "value_cache"), device_types="cpu"
)
def append_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    at: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    options = dict(causal=causal, scale=scale, window=window, softcap=softcap)
    return _on_cpu(q, k, v, key_cache, value_cache, at, sinks, **options)


def _on_cpu(q, k, v, key_cache, value_cache, at, sinks, *, causal, scale, window, softcap):
    kv_append_(key_cache, k, at)
    kv_append_(value_cache, v, at)
    end = int(at.max()) + q.shape[2]
    key, value = key_cache[:, :, :end], value_cache[:, :, :end]
    if sinks is not None or softcap is not None:
        options = dict(causal=causal, scale=scale, window=window, softcap=softcap)
        return block_attention(q, key, value, at, sinks, **options)
    mask = visible_rows(at, q.shape[2], end, causal, window)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(
        q, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )


@append_and_attend.register_kernel("cuda")
def _(q, k, v, key_cache, value_cache, at, sinks=None, *, causal, scale, window=None, softcap=None):
    options = dict(causal=causal, scale=scale, window=window, softcap=softcap)
    if q.shape[3] != v.shape[3] or q.shape[3] > LARGEST_HEAD:
        kv_append_(key_cache, k, at)
        kv_append_(value_cache, v, at)
        return block_attention(q, key_cache, value_cache, at, sinks, **options)
    from speccompile.plugins.block_attention import kernel

    return kernel.append_and_attend(q, k, v, key_cache, value_cache, at, sinks, **options)


@append_and_attend.register_fake
def _(q, k, v, key_cache, value_cache, at, sinks=None, *, causal, scale, window=None, softcap=None):
    return q.new_empty(*q.shape[:3], v.shape[3])
