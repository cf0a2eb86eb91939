"""ONNX lowering of `kv_append`: `TensorScatter`-24, in place where past and present share a buffer."""

from onnxscript.values import Opset

op = Opset("", 24)
_opset18 = Opset("", 18)


def translate(cache, new, at):
    return op.TensorScatter(cache, new, at, axis=2)


def translate_pair(cache, first, at, second, second_at):
    o = _opset18
    zero, one = o.Constant(value_ints=[0]), o.Constant(value_ints=[1])
    first_rows, second_rows = (o.Shape(x, start=2, end=3) for x in (first, second))
    both = o.Concat(first, second, axis=2)
    row = o.Range(
        o.Constant(value_int=0), o.Squeeze(o.Add(first_rows, second_rows), zero), o.Constant(value_int=1)
    )  # [S1 + S2]
    offset = o.Unsqueeze(o.Sub(second_at, at), one)  # [B, 1]
    from_second = o.Add(first_rows, o.Min(o.Sub(row, offset), o.Sub(second_rows, one)))
    pick = o.Unsqueeze(o.Where(o.Less(row, offset), row, from_second), o.Constant(value_ints=[1, 3]))
    return translate(cache, o.GatherElements(both, o.Expand(pick, o.Shape(both)), axis=2), at)
