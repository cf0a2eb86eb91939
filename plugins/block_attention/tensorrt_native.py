"""Lowering of `block_attention` to layers that TensorRT-RTX fuses: `Attention` over the whole capacity and one additive mask.

TensorRT's parser ignores `nonpad_kv_seqlen` and takes `is_causal` from the top left, so lengths, causality and window
are all in the mask. It depends on positions alone: layers of one kind share it, once a step.

TensorRT-RTX 1.7 computes grouped-query attention by copying keys and values out to every query head, whole caches each
step. So the G query heads of a group become G times as many rows of one head: q [B, Hq, S, D] is read as
[B, Hkv, G*S, D], row g*S + s at position q_at + s, with the mask [B, 1, G*S, C].
"""

from onnxscript.values import Opset

op = Opset("", 18)
_opset24 = Opset("", 24)
HIDDEN = -30000.0  # far below any score, and finite in float16, so that no row's softmax divides by zero


def translate(q, key_cache, value_cache, q_at, sinks=None, *, causal, scale, window=None, softcap=None):
    assert sinks is None and not softcap  # refused before: that layer has neither
    heads, kv_heads, size, value_size = q.shape[1], key_cache.shape[1], q.shape[3], value_cache.shape[3]
    rows, capacity = op.Shape(q, start=2, end=3), op.Shape(key_cache, start=2, end=3)
    one = op.Constant(value_ints=[1])
    row = op.Mod(_arange(op.Mul(rows, op.Constant(value_ints=[heads // kv_heads]))), rows)  # [G*S]
    position = op.Unsqueeze(op.Add(op.Unsqueeze(q_at, one), row), op.Constant(value_ints=[1, 3]))
    column = _arange(capacity)
    if causal:
        visible = op.LessOrEqual(column, position)  # [B, 1, G*S, C]
    else:
        last = op.Unsqueeze(op.Sub(op.Add(q_at, rows), one), op.Constant(value_ints=[1, 2, 3]))
        visible = op.LessOrEqual(column, op.Add(last, op.Mul(position, op.Constant(value_int=0))))
    if window is not None:
        distance = op.Sub(position, column)
        near = op.Less(distance if causal else op.Abs(distance), op.Constant(value_ints=[window]))
        visible = op.And(visible, near)
    mask = op.Where(visible, op.CastLike(0.0, q), op.CastLike(HIDDEN, q))
    folded = op.Reshape(q, op.Constant(value_ints=[0, kv_heads, -1, size]))
    out, *_ = _opset24.Attention(folded, key_cache, value_cache, mask, scale=scale)
    return op.Reshape(out, op.Constant(value_ints=[0, heads, -1, value_size]))


def _arange(length):
    """[1] int64 n -> [0, 1, … n-1]"""
    axis = op.Constant(value_ints=[0])
    return op.Range(op.Constant(value_int=0), op.Squeeze(length, axis), op.Constant(value_int=1))
