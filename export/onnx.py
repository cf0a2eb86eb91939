"""A program's graph to an ONNX model, by PyTorch's own translations of ATen and the lowerings of our ops.

`torch.onnx.export` would first trace the whole program again to decompose it, which takes most of a build. The
graph here is functional and nearly core ATen already, so only its translation step is called. That step is
internal to PyTorch: the package pins PyTorch to one minor release, and a test covers the call.
"""

import ast
import functools
import logging
import operator
import os
from collections.abc import Mapping

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as ir_passes
import torch
from onnxscript.optimizer import fold_constants
from onnxscript.values import Opset
from torch import fx
from torch.onnx._internal.exporter import _core, _decomp, _errors, _ir_passes, _registration

from speccompile.export.errors import UserError
from speccompile.plugins.block_attention import block_attention, plugin_node, tensorrt_native
from speccompile.plugins.block_attention import onnx as block_attention_onnx
from speccompile.plugins.group_query_attention import group_query_attention
from speccompile.plugins.group_query_attention import onnx as group_query_attention_onnx
from speccompile.plugins.kv_append import kv_append, kv_append_pair
from speccompile.plugins.kv_append import onnx as kv_append_onnx

OPSET = 24
op = Opset("", 18)  # attributes that later versions of these operators add are of no use here
_opset23 = Opset("", 23)
_contrib = Opset("com.microsoft", 1)


def _linear(x, weight, bias=None):
    """x @ weightᵀ with the weight as the checkpoint stores it, so that a tied embedding and head are one tensor."""
    y = _contrib.FusedMatMul(x, weight, transB=1)
    return y if bias is None else op.Add(y, bias)


def _matmul(x, weight, bias=None):
    y = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


def _cast(x, dtype, *unused, **also_unused):
    return op.Cast(x, to=int(dtype))


def _rms_norm(x, shape, weight, eps):
    return _opset23.RMSNormalization(x, weight, axis=-1, epsilon=eps)


_LOWERINGS = {
    "onnxruntime": {},
    "tensorrt-rtx": {
        torch.ops.aten.linear.default: _matmul,
        block_attention._opoverload: tensorrt_native.translate,
    },
    "tensorrt-plugin": {
        torch.ops.aten.linear.default: _matmul,
        plugin_node.attend_appended._opoverload: plugin_node.translate,
        kv_append._opoverload: plugin_node.translate_append,
    },
}
"""What a back end translates otherwise."""


@functools.cache
def _registry(lowering: str = "onnxruntime") -> _registration.ONNXRegistry:
    for quiet in ("_registration", "_core"):  # torchvision is not needed, and module names are dropped anyway
        logging.getLogger(f"torch.onnx._internal.exporter.{quiet}").setLevel(logging.ERROR)
    _register_fused_matmul()
    group_query_attention_onnx.register_schema()
    plugin_node.register_schemas()
    registry = _registration.ONNXRegistry.from_torchlib(opset_version=OPSET)
    for target, translation in {
        torch.ops.aten.linear.default: _linear,
        torch.ops.aten.rms_norm.default: _rms_norm,
        torch.ops.aten.to.dtype: _cast,
        torch.ops.aten.to.device: lambda x, device, dtype, *unused: _cast(x, dtype),
        torch.ops.aten.__or__.Tensor: lambda a, b: op.Or(a, b),
        torch.ops.aten.__and__.Tensor: lambda a, b: op.And(a, b),
        kv_append._opoverload: kv_append_onnx.translate,
        kv_append_pair._opoverload: kv_append_onnx.translate_pair,
        block_attention._opoverload: block_attention_onnx.translate,
        group_query_attention._opoverload: group_query_attention_onnx.translate,
        **_LOWERINGS[lowering],
    }.items():
        registry.register_op(target, translation)
    return registry


def _register_fused_matmul() -> None:
    if onnx.defs.has("FusedMatMul", "com.microsoft"):
        return
    schema = onnx.defs.OpSchema
    onnx.defs.register_schema(
        schema(
            "FusedMatMul",
            "com.microsoft",
            1,
            inputs=[schema.FormalParameter(n, "T") for n in "AB"],
            outputs=[schema.FormalParameter("Y", "T")],
            attributes=[schema.Attribute("transB", schema.AttrType.INT, required=False)],
            type_constraints=[("T", ["tensor(float)", "tensor(float16)"], "")],
        )  # fmt: skip
    )


def untranslatable(graph: fx.Graph) -> set[str]:
    """Operations of a graph that ONNX has no translation for, or that write in place."""
    found = set()
    for node in graph.nodes:
        if (
            node.op != "call_function"
            or node.target is operator.getitem
            or str(node.target).startswith("aten._assert")
        ):
            continue
        mutable = getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable
        if mutable or not _registry().is_registered(node.target):
            found.add(str(node.target))
    return found


def decompose(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Trace a program again in functional operations that ONNX has, where `untranslatable` found others (slow)."""
    known = set(_decomp.get_onnx_implemented_overloads(_registry()))
    return program.run_decompositions(_decomp.create_onnx_friendly_decomposition_table(known))


def to_onnx(
    graph_module: fx.GraphModule,
    inputs: list[str],
    outputs: list[str],
    dims: Mapping[str, list],
    lowering: str = "onnxruntime",
) -> ir.Model:
    """Translate a functional ATen graph whose parameters are `get_attr` nodes.

    Args:
        inputs, outputs: names for the placeholders and returned values, in order.
        dims: shape of every input and output as a list of ints and dimension names.
        lowering: the back end whose operators to use.
    """
    graph = graph_module.graph
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = operator.attrgetter(node.target)(graph_module).detach()
    model = ir.Model(ir.Graph([], [], nodes=[], name="step"), ir_version=10, producer_name="speccompile")
    try:
        with torch.no_grad():
            _core._translate_fx_graph(
                graph,
                model,
                graph_like=model.graph,
                owned_graphs={},
                lower="at_conversion",
                registry=_registry(lowering),
            )
    except _errors.ConversionError as error:
        if os.environ.get("SPECCOMPILE_DEBUG") == "1":
            raise
        operation = str(error).split("target=")[-1].split("]")[0]
        raise UserError(
            f"The operation {operation} of the traced model has no ONNX form; SPECCOMPILE_DEBUG=1 shows where."
        ) from None
    for value, name in zip(model.graph.inputs, inputs, strict=True):
        value.name = name
        value.shape = ir.Shape(dims[name])
    _name_outputs(model.graph, outputs, dims)
    _ir_passes.add_opset_imports(model)
    model.graph.opset_imports[""] = 18  # that of the translations, a few of which are functions to inline
    ir_passes.InlinePass()(model)
    model.graph.opset_imports[""] = OPSET
    _name_nodes(model.graph)
    _simplify(model)
    return model


def _name_nodes(graph: ir.Graph) -> None:
    """After the module each came from, so that a runtime's messages name a layer of the model."""
    for index, node in enumerate(graph):
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        node.name = "/".join([*scopes[-2:-1], f"{node.op_type}_{index}"])


def _name_outputs(graph: ir.Graph, names: list[str], dims: Mapping[str, list]) -> None:
    for index, name in enumerate(names):
        value = graph.outputs[index]
        if value.producer() is None or value in graph.outputs[:index] or value.name in names:
            node = ir.node("Identity", [value])
            node.outputs[0].dtype = value.dtype
            graph.append(node)
            graph.outputs[index] = value = node.outputs[0]
        value.name = name
        value.shape = ir.Shape(dims[name])


def _simplify(model: ir.Model) -> None:
    """Fold shape arithmetic, merge equal subexpressions, drop what is unused and what only documents the export."""
    fold_constants(model, input_size_limit=1024, output_size_limit=1024 * 1024, onnx_shape_inference=False)
    ir.passes.Sequential(
        ir_passes.CommonSubexpressionEliminationPass(),
        ir_passes.RemoveUnusedNodesPass(),
        ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        ir_passes.DeduplicateInitializersPass(size_limit=1024),
        ir_passes.RemoveUnusedNodesPass(),
        ir_passes.ClearMetadataAndDocStringPass(),
    )(model)
