"""`contract`'s plugins in Python, for TensorRT-RTX and TensorRT: IPluginV3 classes that launch the Triton kernels.

`register(tensorrt_rtx)` makes them known to a process, which a builder needs to build an engine with them and a runtime to
load one. Building needs no GPU. Caches are aliased outputs, so that nothing of a cache is copied.
"""

import functools
from types import ModuleType
from typing import Any

import numpy as np

from speccompile.plugins.block_attention.contract import (
    BLOCK_ATTENTION,
    DOMAIN,
    PLUGINS,
    VERSION,
    Plugin,
    workspace_bytes,
)


@functools.cache
def register(trt: ModuleType) -> list[Any]:
    """Register a creator of each plugin with `trt`'s registry. Returns them: the registry does not keep them alive."""
    kinds = {int: trt.PluginFieldType.INT32, float: trt.PluginFieldType.FLOAT32}
    plugin_class = _plugin_class(trt, kinds)

    class Creator(trt.IPluginCreatorV3One):
        def __init__(self, plugin: Plugin):
            super().__init__()
            self.plugin = plugin
            self.name, self.plugin_namespace, self.plugin_version = plugin.name, DOMAIN, VERSION
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(name, np.array([]), kinds[kind]) for name, kind in plugin.fields.items()]
            )

        def create_plugin(self, name, fields, phase):
            given = {field.name: field.data for field in fields}
            return plugin_class(self.plugin, {n: t(given[n][0]) for n, t in self.plugin.fields.items()})

    creators = [Creator(plugin) for plugin in PLUGINS.values()]
    for creator in creators:
        trt.get_plugin_registry().register_creator(creator, DOMAIN)
    return creators


def _plugin_class(trt: ModuleType, kinds: dict[type, Any]) -> type:
    bases = trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime

    class BlockPlugin(*bases):
        def __init__(self, plugin: Plugin, values: dict[str, Any]):
            for base in bases:
                base.__init__(self)
            self.plugin, self.values = plugin, values
            self.plugin_name, self.plugin_namespace, self.plugin_version = plugin.name, DOMAIN, VERSION
            self.num_outputs = len(plugin.outputs)

        def get_capability_interface(self, kind):
            return self

        def clone(self):
            return BlockPlugin(self.plugin, self.values)

        def get_fields_to_serialize(self):
            numpy_types = {int: np.int32, float: np.float32}
            return trt.PluginFieldCollection(
                [
                    trt.PluginField(name, np.array([self.values[name]], numpy_types[kind]), kinds[kind])
                    for name, kind in self.plugin.fields.items()
                ]
            )

        def get_output_data_types(self, types):
            return [types[0]] * self.num_outputs

        def get_output_shapes(self, inputs, shape_inputs, builder):
            return [inputs[self.plugin.aliases.get(output, 0)] for output in range(self.num_outputs)]

        def get_aliased_input(self, output):
            return self.plugin.aliases.get(output, -1)

        def supports_format_combination(self, position, tensors, num_inputs):
            described = tensors[position].desc
            at = position < num_inputs and self.plugin.inputs[position] == "at"
            wanted = (trt.int64,) if at else (tensors[0].desc.type,)
            known = (trt.int64, trt.float16, trt.bfloat16, trt.float32)
            return (
                described.format == trt.TensorFormat.LINEAR
                and described.type in wanted
                and described.type in known
            )

        def get_valid_tactics(self):
            return []

        def set_tactic(self, tactic):
            pass

        def configure_plugin(self, inputs, outputs):
            pass

        def on_shape_change(self, inputs, outputs):
            pass

        def attach_to_context(self, context):
            return self.clone()

        def get_workspace_size(self, inputs, outputs):
            return workspace_bytes(inputs[0].max[3]) if self.plugin is BLOCK_ATTENTION else 0

        def enqueue(self, input_desc, output_desc, inputs, outputs, workspace, stream):
            import torch

            tensors = [
                [_tensor(p, tuple(d.dims), d.type.name) for p, d in zip(pointers, described, strict=True)]
                for pointers, described in ((inputs, input_desc), (outputs, output_desc))
            ]
            scratch = None
            if self.plugin is BLOCK_ATTENTION:
                scratch = _tensor(workspace, (workspace_bytes(tensors[0][0].shape[3]) // 4,), "FLOAT")
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                compute(self.plugin, self.values, *tensors, scratch)
            return 0

    return BlockPlugin


def compute(plugin: Plugin, values: dict[str, Any], inputs: list, outputs: list, workspace: Any) -> None:
    """Launch a plugin's kernel on PyTorch tensors; the cache among `inputs` is written, being the aliased output too."""
    from speccompile.plugins.block_attention import kernel

    if plugin is not BLOCK_ATTENTION:
        kernel.append_rows(*inputs)
        return
    kernel.append_and_attend(
        *inputs,
        causal=bool(values["causal"]),
        scale=values["scale"],
        window=values["window"] or None,
        softcap=values["softcap"] or None,
        out=outputs[0],
        workspace=workspace,
    )


_ARRAYS = {"INT64": ("<i8", None), "HALF": ("<f2", None), "FLOAT": ("<f4", None), "BF16": ("<i2", "bfloat16")}
"""How CUDA's array interface names TensorRT's types; it has no bfloat16, whose bits travel as integers."""


def _tensor(pointer: int, shape: tuple[int, ...], kind: str) -> Any:
    """Device memory of TensorRT's as a PyTorch tensor."""
    import torch

    code, seen_as = _ARRAYS[kind]
    interface = {"data": (pointer, False), "shape": shape, "typestr": code, "version": 3}
    memory = type("Memory", (), {"__cuda_array_interface__": interface})()
    tensor = torch.as_tensor(memory, device="cuda")
    return tensor if seen_as is None else tensor.view(getattr(torch, seen_as))
