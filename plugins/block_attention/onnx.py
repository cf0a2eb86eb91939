"""ONNX lowering of `block_attention` in standard operators: the portable form.

`Attention`-24 takes the valid prefix of the cache, cut to the longest sequence of the batch, and a bool mask
that says which of its rows each block row sees.
"""

from onnxscript.values import Opset

op = Opset("", 18)
_opset24 = Opset("", 24)


def translate(q, key_cache, value_cache, q_at, sinks=None, *, causal, scale, window=None, softcap=None):
    zero, one = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    rows = op.Shape(q, start=2, end=3)  # [1]
    end = op.Add(op.ReduceMax(q_at, keepdims=1), rows)  # [1]: valid rows of the longest sequence
    key = op.Slice(key_cache, zero, end, op.Constant(value_ints=[2]))
    value = op.Slice(value_cache, zero, end, op.Constant(value_ints=[2]))
    position = op.Unsqueeze(
        op.Add(op.Unsqueeze(q_at, one), _arange(rows)), op.Constant(value_ints=[1, 3])
    )  # [B, 1, S, 1]
    column = _arange(end)  # [T]
    last = (
        position
        if causal
        else op.Unsqueeze(op.Sub(op.Add(q_at, rows), one), op.Constant(value_ints=[1, 2, 3]))
    )
    # ONNX Runtime does not broadcast the row axis of a mask: the second comparison, always true, gives it S rows.
    mask = op.And(op.LessOrEqual(column, last), op.GreaterOrEqual(position, zero))  # [B, 1, S, T]
    if window is not None:
        distance, limit = op.Sub(position, column), op.Constant(value_ints=[window])
        mask = op.And(mask, op.Less(distance if causal else op.Abs(distance), limit))
    if sinks is not None:
        key, value, mask = _with_sinks(q, key, value, mask, sinks)
    out, *_ = _opset24.Attention(q, key, value, mask, scale=scale, softcap=softcap or 0.0)
    return out


def _arange(length):
    """[1] int64 n -> [0, 1, … n-1]"""
    axis = op.Constant(value_ints=[0])
    return op.Range(op.Constant(value_int=0), op.Squeeze(length, axis), op.Constant(value_int=1))


def _with_sinks(q, key, value, mask, sinks):
    """A sink is one more key, all zeros, whose score is the sink's logit by way of the mask and whose value is zero."""
    row_axis = op.Constant(value_ints=[2])
    blank = op.Mul(
        op.Slice(key, op.Constant(value_ints=[0]), op.Constant(value_ints=[1]), row_axis),
        op.CastLike(0.0, key),
    )
    blank_value = op.Mul(
        op.Slice(value, op.Constant(value_ints=[0]), op.Constant(value_ints=[1]), row_axis),
        op.CastLike(0.0, key),
    )
    allowed = op.Where(mask, op.CastLike(0.0, q), op.CastLike(float("-inf"), q))  # [B, 1, S, T]
    zeros = op.Mul(
        op.Slice(q, op.Constant(value_ints=[0]), op.Constant(value_ints=[1]), op.Constant(value_ints=[3])),
        op.CastLike(0.0, q),
    )
    logits = op.Add(zeros, op.Unsqueeze(sinks, op.Constant(value_ints=[0, 2, 3])))  # [B, Hq, S, 1]
    return (
        op.Concat(key, blank, axis=2),
        op.Concat(value, blank_value, axis=2),
        op.Concat(op.Add(allowed, zeros), logits, axis=3),
    )
