"""`contract`'s BlockAttention as an operation of the traced graph, and both plugins as ONNX nodes."""

import onnx
import torch
from onnxscript.values import Opset

from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.block_attention.contract import DOMAIN, PLUGINS
from speccompile.plugins.kv_append import kv_append


@torch.library.custom_op("speccompile::attend_appended", mutates_args=())
def attend_appended(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference of BlockAttention."""
    key, value = kv_append(key_cache, k, at), kv_append(value_cache, v, at)
    options = dict(causal=causal, scale=scale, window=window, softcap=softcap)
    return block_attention(q, key, value, at, sinks, **options), key, value


@attend_appended.register_fake
def _(q, k, v, key_cache, value_cache, at, sinks=None, *, causal, scale, window=None, softcap=None):
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, torch.empty_like(key_cache), torch.empty_like(value_cache)


_opset = Opset(DOMAIN, 1)


def translate(q, k, v, key_cache, value_cache, at, sinks=None, *, causal, scale, window=None, softcap=None):
    return _opset.BlockAttention(
        q, k, v, key_cache, value_cache, at, *([] if sinks is None else [sinks]),
        causal=int(causal), scale=scale, window=window or 0, softcap=softcap or 0.0,
    )  # fmt: skip


def translate_append(cache, new, at):
    return _opset.KVAppend(cache, new, at)


def register_schemas() -> None:
    """Tell the `onnx` package of the nodes, so that the exporter can build them."""
    schema = onnx.defs.OpSchema
    kinds = {int: schema.AttrType.INT, float: schema.AttrType.FLOAT}
    options = schema.FormalParameterOption
    for plugin in PLUGINS.values():
        if onnx.defs.has(plugin.name, DOMAIN):
            continue
        inputs = [
            schema.FormalParameter(
                name,
                "tensor(int64)" if name == "at" else "T",
                param_option=options.Optional if name in plugin.optional else options.Single,
            )
            for name in plugin.inputs
        ]
        onnx.defs.register_schema(
            schema(
                plugin.name,
                DOMAIN,
                1,
                inputs=inputs,
                outputs=[schema.FormalParameter(name, "T") for name in plugin.outputs],
                attributes=[schema.Attribute(n, kinds[t], required=True) for n, t in plugin.fields.items()],
                type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
            )  # fmt: skip
        )
