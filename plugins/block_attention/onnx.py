"""ONNX lowering of `block_attention` in standard operators: the portable form.

`Attention`-24 takes the valid prefix of the cache, cut to the longest sequence of the batch, and a bool mask
that says which of its rows each block row sees.
"""

from onnxscript.values import Opset

op = Opset("", 18)
_opset24 = Opset("", 24)



def translate(q, key_cache, value_cache, q_at, sinks=None, *, causal, scale, window=None, softcap=None):
    int64 = dict(dtype=7)
    rows = op.Shape(q, start=2, end=3)  # [1]
    row = op.Range(op.Cast(0, to=7), op.Squeeze(rows), op.Cast(1, to=7))
    del int64
    end = op.Add(op.ReduceMax(q_at, keepdims=1), rows)  # [1]: valid rows of the longest sequence
    key = op.Slice(key_cache, op.Constant(value_ints=[0]), end, op.Constant(value_ints=[2]))
    value = op.Slice(value_cache, op.Constant(value_ints=[0]), end, op.Constant(value_ints=[2]))
    column = op.Range(op.Cast(0, to=7), op.Squeeze(end), op.Cast(1, to=7))  # [T]
    position = op.Unsqueeze(op.Add(op.Unsqueeze(q_at, [1]), row), [1, 3])  # [B, 1, S, 1]
    last = position if causal else op.Unsqueeze(op.Sub(op.Add(q_at, rows), op.Cast(1, to=7)), [1, 2, 3])
    mask = op.And(op.LessOrEqual(column, last), op.GreaterOrEqual(position, op.Cast(0, to=7)))  # [B, 1, S, T]
    if window is not None:
        distance = op.Sub(position, column)
        near = op.Less(distance, op.Cast(window, to=7))
        if not causal:
            near = op.And(near, op.Less(op.Neg(distance), op.Cast(window, to=7)))
        mask = op.And(mask, near)
    if sinks is not None:
        raise NotImplementedError
    out, *_ = _opset24.Attention(q, key, value, mask, scale=scale, softcap=softcap or 0.0)
    return out
