"""Engines of TensorRT-RTX, built on a machine that needs no GPU, and what can be read from them there; and of TensorRT,
built on the GPU they are for.

The library runs in a process of its own (`tensorrt_worker`), since some of its failures end the process. What it
builds is checked before it is kept: TensorRT silently drops lengths and masks, falls back to plain matrix products,
and copies caches.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import fx

from speccompile.export.errors import UserError
from speccompile.export.weights import externalise
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.block_attention.contract import LARGEST_HEAD, PLUGINS
from speccompile.plugins.block_attention.plugin_node import attend_appended
from speccompile.plugins.kv_append import kv_append, kv_append_pair

ARCHITECTURES = (75, 80, 86, 89, 120, 121)
FUSED_ATTENTION = "_gemm_mha_v2"
PLAIN_COPY = re.compile(r"__myl_(Resh|Tran|Move)+")
"""Kernels that bring a cache, as large as it is, into the form the attention kernel reads."""
MOST_ELEMENTS = 2**31 - 1
MOST_CANDIDATES = 3840
Profile = dict[str, dict[str, list[int]]]
"""{input: {"min": shape, "opt": shape, "max": shape}}"""


def check_installed(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        backend = library.replace("_", "-")
        raise UserError(
            f"--backend {backend} needs the package {library}, which is not installed: pip install 'speccompile[{backend}]'."
        )


def check_architectures(chosen: tuple[int, ...], dtype: str) -> None:
    for sm in chosen:
        if sm not in ARCHITECTURES:
            raise UserError(
                f"--sm {sm} is no compute capability TensorRT-RTX builds for; choose among {', '.join(map(str, ARCHITECTURES))}."
            )
    if dtype == "bfloat16" and 75 in chosen:
        raise UserError(
            "--sm 75 has no bfloat16; give --dtype float16, or leave that compute capability out."
        )


def check_program(graph_module: fx.GraphModule, plugin: bool) -> None:
    """Raises UserError for what TensorRT's own layers, or our plugins, cannot compute."""
    for node in graph_module.graph.nodes:
        if str(node.target) == "aten.topk.default" and node.args[1] > MOST_CANDIDATES:
            raise UserError(
                f"The draft's head chooses among {node.args[1]} candidates, and TensorRT sorts at most {MOST_CANDIDATES}; give --head-candidates."
            )
        (_check_plugin_node if plugin else _check_native_node)(node)


def _check_plugin_node(node: fx.Node) -> None:
    if node.target is block_attention._opoverload:
        raise UserError(
            "This pair attends to rows that the same step appended before, for another purpose, which the plugin does not; leave out --plugin."
        )
    if node.target is attend_appended._opoverload:
        size, value_size = (node.args[i].meta["val"].shape[3] for i in (1, 2))
        if size != value_size or size > LARGEST_HEAD:
            raise UserError(
                f"This pair attends with heads of {size} (keys) and {value_size} (values), and the plugin takes equal ones up to {LARGEST_HEAD}; "
                "leave out --plugin."
            )


def _check_native_node(node: fx.Node) -> None:
    if node.target is block_attention._opoverload:
        for feature, asked in (
            ("attention sinks", len(node.args) > 4 and node.args[4] is not None),
            ("a soft-cap on attention scores", node.kwargs.get("softcap")),
        ):
            if asked:
                raise UserError(
                    f"This pair attends with {feature}, which TensorRT's attention layer does not have; --plugin does."
                )
    if node.target in (kv_append._opoverload, kv_append_pair._opoverload):
        if node.args[0].op != "placeholder":
            raise UserError(
                "This draft updates a cache several times a step (a chain of passes), and TensorRT's layer allows one update; "
                "give a parallel draft, or --plugin."
            )


def step_profiles(model: ir.Model, width: int, chunk: int, max_batch: int) -> list[Profile]:
    """Two profiles: decoding, up to `width` rows a step, and prefill, up to `chunk`. Raises UserError over TensorRT's limits."""
    profiles = []
    for rows in (width, chunk):
        sizes = {
            "min": {"batch": 1, "rows": 1},
            "opt": {"batch": (max_batch + 1) // 2, "rows": rows},
            "max": {"batch": max_batch, "rows": rows},
        }
        profiles.append(
            {
                value.name: {
                    bound: [dim if isinstance(dim, int) else sizes[bound][dim.value] for dim in value.shape]
                    for bound in sizes
                }
                for value in model.graph.inputs
            }
        )
    for name, shapes in profiles[-1].items():
        elements = 1
        for dim in shapes["max"]:
            elements *= dim
        if elements > MOST_ELEMENTS:
            raise UserError(
                f"{name} would have {elements} elements ({'x'.join(map(str, shapes['max']))}), and a TensorRT tensor holds at most "
                f"{MOST_ELEMENTS}; lower --max-batch-size or --max-seq-len."
            )
    return profiles


def build_engine(
    model: ir.Model,
    engine: Path,
    profiles: list[Profile],
    architectures: tuple[int, ...],
    plugin: bool,
    progress: Callable[[str, int, int], None] = lambda phase, step, of: None,
    library: str = "tensorrt_rtx",
) -> dict[str, Any]:
    """Build `engine` from the model. Returns what `inspect` shows of it. Raises UserError with TensorRT's reason."""
    with tempfile.TemporaryDirectory(dir=engine.parent, prefix=".tensorrt-") as folder:
        work = Path(folder)
        externalise([model], work / "weights")
        ir.save(model, work / "step.onnx")
        spec = {
            "library": library,
            "onnx": str(work / "step.onnx"),
            "engine": str(engine),
            "profiles": profiles,
            "sm": list(architectures),
            "plugins": plugin,
        }
        (work / "spec.json").write_text(json.dumps(spec))
        report = _run_worker(work, library, progress)
        layers = report["layers"]
    described = describe(engine)
    if plugin:
        _check_plugins(model, layers, described)
    else:
        _check(layers, described, len(profiles))
    attentions = [layer for layer in layers if layer["type"] == "ATTENTION_OUTPUT"]
    return {
        "layers": dict(Counter(layer["type"] for layer in layers).most_common()),
        "attention": [
            {**{k: layer[k] for k in ("mask", "lengths", "causal", "decomposable")}, "layers": count}
            for layer, count in _distinct(attentions)
        ],
        "library": library,
        "version": report["version"],
        "plugins": dict(Counter(node.op_type for node in model.graph if node.op_type in PLUGINS)),
        "architectures": list(architectures),
        "profiles": profiles,
        "cache_readers": described["cache_readers"],
    }


def _distinct(attentions: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    counts = Counter(json.dumps({k: v for k, v in layer.items() if k != "name"}) for layer in attentions)
    return [(json.loads(text), count) for text, count in counts.items()]


def _run_worker(work: Path, library: str, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    command = [sys.executable, "-m", "speccompile.export.tensorrt_worker", str(work / "spec.json")]
    with (work / "errors").open("w+") as errors:
        process = subprocess.Popen(
            command, env=_environment(work, library), stdout=subprocess.PIPE, stderr=errors, text=True
        )
        answer: dict[str, Any] = {}
        for line in process.stdout:
            message = json.loads(line)
            if "phase" in message:
                progress(message["phase"], message["step"], message["of"])
            else:
                answer = message
        code = process.wait()
        if "report" in answer:
            return answer["report"]
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:] or ["it said nothing"]
    raise UserError(_readable(answer.get("error") or f"TensorRT ended with code {code}: {last[0]}"))


def _readable(error: str) -> str:
    if "not supported by a dedicated kernel" in error:
        return (
            "TensorRT-RTX has no fused kernel for this pair's attention (head sizes 64, 80, 96, 128 and 256 have one; the target's and "
            "the draft's must both), and would fall back to plain matrix products; --backend onnxruntime takes any."
        )
    return " ".join(error.split())[:500]


def _environment(work: Path, library: str) -> dict[str, str]:
    """TensorRT-RTX's parser opens `libtensorrt_rtx.so`, of which the wheel has only `.so.1`, and ends the process where it finds none."""
    if library != "tensorrt_rtx":
        return dict(os.environ)
    libraries = Path(importlib.util.find_spec("tensorrt_rtx_libs").submodule_search_locations[0])
    (work / "libtensorrt_rtx.so").symlink_to(libraries / "libtensorrt_rtx.so.1")
    known = os.environ.get("LD_LIBRARY_PATH")
    return os.environ | {"LD_LIBRARY_PATH": f"{work}:{known}" if known else str(work)}


_LAUNCH = re.compile(
    rb"function=\{ name=(\S+) .*? input_args=\{ (.*?) \} shape_args_count=\d+ output_args=\{ (.*?) \}"
)
_CACHE = re.compile(rb'"((?:target|draft)\.\d+\.(?:key|value))(?:\.out)?\b')


def describe(engine: Path) -> dict[str, Any]:
    """What the engine's own text says, both profiles together: launches by kernel, and caches read by other kernels than
    attention and update. The format is not documented by NVIDIA."""
    kernels: Counter[str] = Counter()
    readers: Counter[str] = Counter()
    for name, inputs, outputs in _LAUNCH.findall(engine.read_bytes()):
        kernels[name.decode()] += 1
        read, written = set(_CACHE.findall(inputs)), set(_CACHE.findall(outputs))
        if read - written and name.decode() != FUSED_ATTENTION:
            readers[name.decode()] += len(read - written)
    return {"kernels": dict(kernels.most_common()), "cache_readers": dict(readers)}


def _check(layers: list[dict[str, Any]], described: dict[str, Any], profiles: int) -> None:
    attentions = [layer for layer in layers if layer["type"] == "ATTENTION_OUTPUT"]
    for layer in attentions:
        if not layer["mask"] or layer["lengths"] or layer["causal"] != "NONE" or layer["decomposable"]:
            raise UserError(
                f"TensorRT-RTX changed the attention of {layer['name']}: {layer}; a mask alone was asked for."
            )
    fused = described["kernels"].get(FUSED_ATTENTION, 0)
    if not attentions or fused != len(attentions) * profiles:
        raise UserError(
            f"TensorRT-RTX fused {fused} of {len(attentions) * profiles} attentions; the rest would be plain matrix products, so the engine was not kept."
        )
    expanded = [name for name in described["cache_readers"] if not PLAIN_COPY.fullmatch(name)]
    if expanded:
        raise UserError(
            f"TensorRT-RTX reads a cache outside its attention kernel (in {expanded[0]}), every step, so the engine was not kept."
        )


def _check_plugins(model: ir.Model, layers: list[dict[str, Any]], described: dict[str, Any]) -> None:
    asked = sum(node.op_type in PLUGINS for node in model.graph)
    found = sum(layer["type"] == "PLUGIN_V3" for layer in layers)
    if found != asked or "ATTENTION_OUTPUT" in {layer["type"] for layer in layers}:
        raise UserError(f"TensorRT made {found} plugin layers of {asked}, so the engine was not kept.")
    if described["cache_readers"]:
        raise UserError(
            f"TensorRT-RTX copies a cache (in {next(iter(described['cache_readers']))}), every step, so the engine was not kept."
        )
