"""What every form of the TensorRT plugins agrees on: `speccompile::BlockAttention` and `speccompile::KVAppend`.

    BlockAttention(q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, D], key_cache [B, Hkv, C, D], value_cache [B, Hkv, C, D],
                   at [B] int64, sinks [Hq] | absent; causal, scale, window, softcap)
        -> [B, Hq, S, D], key_cache', value_cache'

is `kv_append` of k and v at `at`, then `block_attention` of q; `window` and `softcap` are 0 for none. KVAppend(cache, new,
at) -> cache' is `kv_append`. A cache' is its input's own buffer. The Triton kernels of `kernel.py` compute both.
"""

from typing import NamedTuple

DOMAIN = "speccompile"
VERSION = "1"
LARGEST_HEAD = 256
MOST_PROCESSORS = 256
"""No more of a device's multiprocessors are counted, so that a workspace can be sized where there is none."""


class Plugin(NamedTuple):
    """`inputs` in order; `aliases` maps an output to the input whose buffer it is; `fields` are int32 or float32."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[int, int]
    fields: dict[str, type]
    optional: tuple[str, ...] = ()


BLOCK_ATTENTION = Plugin(
    "BlockAttention",
    ("q", "k", "v", "key_cache", "value_cache", "at", "sinks"),
    ("out", "key_cache_out", "value_cache_out"),
    {1: 3, 2: 4},
    {"causal": int, "scale": float, "window": int, "softcap": float},
    ("sinks",),
)
KV_APPEND = Plugin("KVAppend", ("cache", "new", "at"), ("cache_out",), {0: 0}, {})
PLUGINS = {plugin.name: plugin for plugin in (BLOCK_ATTENTION, KV_APPEND)}


def workspace_bytes(size: int) -> int:
    """Of BlockAttention with heads of `size`, whatever the batch and rows: parts of the cache are made until MOST_PROCESSORS
    have work, so there are fewer than twice as many, of at most 64 query rows each."""
    return 2 * MOST_PROCESSORS * 64 * (size + 2) * 4
