"""ONNX lowering of `group_query_attention`: the node `com.microsoft::GroupQueryAttention`."""

import onnx
from onnxscript.values import Opset

_contrib = Opset("com.microsoft", 1)


def translate(
    q, k, v, past_key, past_value, last, longest, added, sinks=None,
    *, num_heads, kv_num_heads, scale, window=None, softcap=None,
):  # fmt: skip
    unused = None
    return _contrib.GroupQueryAttention(
        q, k, v, past_key, past_value, last, longest,
        unused, unused, unused, unused, sinks, unused, unused, unused, unused, added,
        num_heads=num_heads, kv_num_heads=kv_num_heads, scale=scale,
        local_window_size=-1 if window is None else window, softcap=softcap or 0.0,
    )  # fmt: skip


def register_schema() -> None:
    """Tell the `onnx` package the node's shape, so that the exporter can build it (ONNX Runtime knows it already)."""
    if onnx.defs.has("GroupQueryAttention", "com.microsoft"):
        return
    schema = onnx.defs.OpSchema
    optional = schema.FormalParameterOption.Optional
    inputs = [
        schema.FormalParameter(
            n, "T", param_option=optional if i > 2 else schema.FormalParameterOption.Single
        )
        for i, n in enumerate(["query", "key", "value", "past_key", "past_value"])
    ]
    inputs += [schema.FormalParameter("seqlens_k", "M"), schema.FormalParameter("total_sequence_length", "M")]
    names = [
        "cos_cache",
        "sin_cache",
        "position_ids",
        "attention_bias",
        "head_sink",
        "k_scale",
        "v_scale",
        "q_norm_weight",
        "k_norm_weight",
    ]
    inputs += [
        schema.FormalParameter(n, "I" if n == "position_ids" else "T", param_option=optional) for n in names
    ]
    inputs += [schema.FormalParameter("query_seqlens", "M", param_option=optional)]
    outputs = [schema.FormalParameter(n, "T") for n in ("output", "present_key", "present_value")]
    integer, real = schema.AttrType.INT, schema.AttrType.FLOAT
    attributes = [
        schema.Attribute(n, t, required=False)
        for n, t in (
            ("num_heads", integer),
            ("kv_num_heads", integer),
            ("scale", real),
            ("local_window_size", integer),
            ("softcap", real),
        )
    ]
    onnx.defs.register_schema(schema(
        "GroupQueryAttention", "com.microsoft", 1, inputs=inputs, outputs=outputs, attributes=attributes,
        type_constraints=[("T", ["tensor(float)", "tensor(float16)"], ""), ("M", ["tensor(int32)"], ""), ("I", ["tensor(int64)"], "")],
    ))  # fmt: skip
