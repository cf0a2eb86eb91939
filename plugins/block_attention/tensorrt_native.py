"""Lowering of `block_attention` to layers that TensorRT-RTX fuses: `Attention` over the whole capacity and one additive mask.

TensorRT's parser ignores `nonpad_kv_seqlen` and takes `is_causal` from the top left, so lengths, causality and window
are all in the mask [B, 1, S, C]. It depends on positions alone: layers of one kind share it, once a step.
"""

from onnxscript.values import Opset

from speccompile.export.errors import UserError

op = Opset("", 18)
_opset24 = Opset("", 24)
HIDDEN = -30000.0  # far below any score, and finite in float16, so that no row's softmax divides by zero


def translate(q, key_cache, value_cache, q_at, sinks=None, *, causal, scale, window=None, softcap=None):
    for feature, asked in (
        ("attention sinks", sinks is not None),
        ("a soft-cap on attention scores", softcap),
    ):
        if asked:
            raise UserError(
                f"TensorRT's own attention layer cannot compute {feature}, which this pair needs; give --plugin."
            )
    one = op.Constant(value_ints=[1])
    rows, capacity = op.Shape(q, start=2, end=3), op.Shape(key_cache, start=2, end=3)
    position = op.Unsqueeze(op.Add(op.Unsqueeze(q_at, one), _arange(rows)), op.Constant(value_ints=[1, 3]))
    column = _arange(capacity)
    if causal:
        visible = op.LessOrEqual(column, position)  # [B, 1, S, C]
    else:
        last = op.Unsqueeze(op.Sub(op.Add(q_at, rows), one), op.Constant(value_ints=[1, 2, 3]))
        visible = op.LessOrEqual(column, op.Add(last, op.Mul(position, op.Constant(value_int=0))))
    if window is not None:
        distance = op.Sub(position, column)
        near = op.Less(distance if causal else op.Abs(distance), op.Constant(value_ints=[window]))
        visible = op.And(visible, near)
    mask = op.Where(visible, op.CastLike(0.0, q), op.CastLike(HIDDEN, q))
    out, *_ = _opset24.Attention(q, key_cache, value_cache, mask, scale=scale)
    return out


def _arange(length):
    """[1] int64 n -> [0, 1, … n-1]"""
    axis = op.Constant(value_ints=[0])
    return op.Range(op.Constant(value_int=0), op.Squeeze(length, axis), op.Constant(value_int=1))
