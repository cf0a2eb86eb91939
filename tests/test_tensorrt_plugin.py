"""The TensorRT plugins, as far as a machine without a GPU goes: their numbers, their nodes, and engines with them inside."""

import contextlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from shell import speccompile

from speccompile.compiler.build import BuildOptions, build
from speccompile.export.directory import open_engine
from speccompile.export.errors import UserError
from speccompile.plugins.block_attention import contract, plugin_node, tensorrt_plugin
from speccompile.plugins.kv_append import kv_append
from speccompile.runtime import Engine
from speccompile.runtime.self_check import self_check
from speccompile.runtime.session import StepOutput

pytest.importorskip("triton")
from speccompile.plugins.block_attention import kernel  # noqa: E402

built_here = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)


def launch(plugin, values, arrays):
    """A plugin's kernel, in Triton's interpreter, on numpy arrays: its outputs. Caches are copied first, then written."""
    inputs = [torch.from_numpy(a.copy()) for a in arrays]
    outputs = [
        inputs[plugin.aliases[i]] if i in plugin.aliases else torch.empty_like(inputs[0])
        for i in range(len(plugin.outputs))
    ]
    tensorrt_plugin.compute(plugin, values, inputs, outputs, None)
    return tuple(o.numpy() for o in outputs)


class BlockAttention(OpRun):
    op_domain = contract.DOMAIN

    def _run(self, *inputs, causal, scale, window, softcap):
        values = dict(causal=causal, scale=scale, window=window, softcap=softcap)
        return launch(contract.BLOCK_ATTENTION, values, inputs)


class KVAppend(OpRun):
    op_domain = contract.DOMAIN

    def _run(self, *inputs):
        return launch(contract.KV_APPEND, {}, inputs)


class GatherElements(OpRun):
    """The evaluator's own (onnx 1.23) refuses an index with fewer columns than the data."""

    def _run(self, data, indices, axis=0):
        return (torch.from_numpy(data).gather(axis, torch.from_numpy(indices)).numpy(),)


class Evaluated:
    """A step's ONNX graph with plugin nodes, by the `onnx` package's evaluator and the plugins' own kernels."""

    batch, plain = 1, False

    def __init__(self, engine):
        settings = engine.settings
        model = onnx.load(engine.path / settings["step_file"])
        self.nodes = [node.op_type for node in model.graph.node]
        self.graph = ReferenceEvaluator(model, new_ops=[BlockAttention, KVAppend, GatherElements])
        self.aliases = settings["aliases"][settings["step_file"]]
        shapes = {
            name: (1, c["heads"], settings["capacity"], c["size"]) for name, c in settings["caches"].items()
        }
        self.caches = {name: np.zeros(shape, settings["dtype"]) for name, shape in shapes.items()}

    def step(self, *arrays):
        given = dict(zip(("tokens", "num_tokens", "num_known", "lengths", "next_tokens"), arrays))
        feeds = {name: (given | self.caches)[name] for name in self.graph.input_names}
        values = dict(zip(self.graph.output_names, self.graph.run(None, feeds)))
        for name, cache in self.aliases.items():
            self.caches[cache] = values.pop(name)
        return StepOutput(**values)


@pytest.mark.parametrize(
    ("architecture", "draft_family"),
    [("llama", "causal-depth"), ("gpt_oss", "dflash2"), ("gemma2", "eagle3"), ("mistral", "dspark")],
)
def test_a_step_with_plugins_computes_the_same(tmp_path, onnx_instead, architecture, draft_family):
    """Sinks, soft-cap, windows and chains too: what the build recorded, from the plugin road's graph and kernels."""
    target = tiny.save_target(tmp_path / "target", architecture)
    draft = tiny.save_draft(tmp_path / "draft", target, **tiny.FAMILIES[draft_family])
    options = BuildOptions(
        str(target), str(draft), tmp_path / "engine", max_seq_len=64, backend="tensorrt-rtx", plugin=True
    )
    build(options)
    engine = open_engine(tmp_path / "engine")
    session = Evaluated(engine)
    assert "TensorScatter" not in session.nodes and "Attention" not in session.nodes
    chain = draft_family == "eagle3"  # whose every append is followed by its attention
    assert "BlockAttention" in session.nodes and chain is ("KVAppend" not in session.nodes)
    self_check(session, engine)
    session.step = lambda *arrays: StepOutput(*(np.zeros((1, 4), np.int64),) * 4)
    with pytest.raises(UserError, match="does not compute"):
        self_check(session, engine)


@pytest.fixture
def creators():
    """The registered creators by name, of TensorRT-RTX."""
    trt = pytest.importorskip("tensorrt_rtx")
    return {creator.name: creator for creator in tensorrt_plugin.register(trt)}


def fields(trt, **values):
    kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    return trt.PluginFieldCollection(
        [trt.PluginField(n, np.array([v], kinds[type(v)][0]), kinds[type(v)][1]) for n, v in values.items()]
    )


@pytest.mark.parametrize("window", [0, 3])
def test_enqueue_finds_its_tensors_by_pointer(creators, monkeypatch, window):
    """The plugins as TensorRT calls them, with host memory in place of the device's."""
    import tensorrt_rtx as trt

    memory, used = {}, []

    def tensor(pointer, shape, kind):
        used.append((shape, kind))
        return memory[pointer]

    def described(tensors):
        kinds = {torch.int64: trt.int64, torch.float32: trt.float32}
        return [SimpleNamespace(dims=tuple(t.shape), type=kinds[t.dtype]) for t in tensors]

    monkeypatch.setattr(tensorrt_plugin, "_tensor", tensor)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream: stream)
    torch.manual_seed(0)
    q, new, caches = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 2, 3, 16), torch.randn(2, 2, 2, 20, 16)
    at, out, sinks = torch.tensor([0, 11]), torch.empty(2, 4, 3, 16), torch.randn(4)
    workspace = torch.empty(contract.workspace_bytes(16) // 4)
    options = dict(causal=True, scale=0.25, window=window or None)
    expected = plugin_node.attend_appended(q, *new, *caches, at, sinks, **options)
    appended = kv_append(caches[0], new[0], at + 3)

    def enqueue(name, inputs, outputs, **values):
        memory.update({t.data_ptr(): t for t in (*inputs, *outputs, workspace)})
        plugin = creators[name].create_plugin("layer", fields(trt, **values), trt.TensorRTPhase.RUNTIME)
        again = {f.name: f.data[0] for f in plugin.get_fields_to_serialize()}
        assert again == values  # what a loaded engine makes the plugin from
        pointers = ([t.data_ptr() for t in tensors] for tensors in (inputs, outputs))
        plugin.clone().enqueue(described(inputs), described(outputs), *pointers, workspace.data_ptr(), 0)

    key, value = caches.clone().unbind()
    enqueue(
        "BlockAttention",
        [q, *new, key, value, at, sinks],
        [out, key, value],
        causal=1,
        scale=0.25,
        window=window,
        softcap=0.0,
    )
    for found, wanted in zip((out, key, value), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)
    assert ((2, 4, 3, 16), "FLOAT") in used and ((2,), "INT64") in used
    key = caches[0].clone()
    enqueue("KVAppend", [key, new[0], at + 3], [key])
    assert torch.equal(key, appended)


@given(
    st.integers(1, 64), st.integers(1, 16), st.integers(1, 8), st.integers(1, 600),
    st.sampled_from([16, 64, 128, 256]), st.integers(1, 400), st.sampled_from([64, 4096, 131072]),
)  # fmt: skip
def test_the_workspace_suffices(batch, kv_heads, groups, rows, size, processors, capacity):
    row_tiles = -(-groups * rows // kernel.tiles(groups, rows, size)["BLOCK_M"])
    splits = kernel.splits_for(batch, kv_heads, row_tiles, capacity, processors)
    parts = batch * kv_heads * splits * groups * rows if splits > 1 else 0
    assert 4 * parts * (size + 2) <= contract.workspace_bytes(size)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.save_target(tmp_path_factory.mktemp("plugin") / "target", hidden_size=128, head_dim=64)


@built_here
@pytest.mark.parametrize(("family", "dtype"), [("causal-depth", "bfloat16"), ("eagle3", "float16")])
def test_an_engine_with_plugins_is_built_without_a_gpu(target, tmp_path, family, dtype):
    """Four attentions of the target's; the draft's, which for a chain are one a pass over one cache."""
    draft = tiny.save_draft(tmp_path / "draft", target, **tiny.FAMILIES[family])
    options = "--target", target, "--draft", draft, "--out", tmp_path / "engine", "--max-seq-len", 64
    done = speccompile(
        "build", *options, "--backend", "tensorrt-rtx", "--plugin", "--sm", "89", "--dtype", dtype, "--json"
    )
    built = json.loads(done.stdout)["tensorrt"]
    plugins = built["plugins"]
    assert built["layers"]["PLUGIN_V3"] == sum(plugins.values()) and built["cache_readers"] == {}
    assert plugins["BlockAttention"] >= 4 + 2 and not {"ATTENTION_OUTPUT", "KV_CACHE_UPDATE"} & set(
        built["layers"]
    )
    engine = (tmp_path / "engine" / "rank0.engine").read_bytes()
    assert all(word.encode() in engine for word in (*plugins, "softcap"))
    said = " ".join(speccompile("inspect", tmp_path / "engine").stdout.split())
    assert f"speccompile's plugins: {', '.join(f'{n} {p}' for p, n in plugins.items())}" in said
    settings = json.loads((tmp_path / "engine" / "config.json").read_text())["speccompile"]
    assert settings["plugins"] == [
        {"name": name, "namespace": "speccompile", "version": "1"} for name in ("BlockAttention", "KVAppend")
    ]


@built_here
def test_the_full_librarys_road(target, tmp_path, monkeypatch):
    """`--backend tensorrt` with TensorRT-RTX in the place of TensorRT, which needs a GPU to be imported."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "tensorrt.py").write_text("from tensorrt_rtx import *\nfrom tensorrt_rtx import __version__\n")
    (libraries,) = importlib.util.find_spec("tensorrt_rtx_libs").submodule_search_locations
    (library / "libtensorrt_rtx.so").symlink_to(f"{libraries}/libtensorrt_rtx.so.1")
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.syspath_prepend(str(library))
    draft = tiny.save_draft(tmp_path / "draft", target)
    options = "--target", target, "--draft", draft, "--out", tmp_path / "engine", "--backend", "tensorrt"
    done = speccompile("build", *options, "--max-seq-len", 64, "--json")
    built = json.loads(done.stdout)["tensorrt"]
    assert built["library"] == "tensorrt" and built["plugins"]["BlockAttention"] == 4 + 2
    assert built["architectures"] == []
    assert "tensorrt" in json.loads((tmp_path / "engine" / "manifest.json").read_text())["versions"]
    assert (
        "--sm is of no use to --backend tensorrt"
        in speccompile("build", *options, "--force", "--sm", "89", code=2).stderr
    )
    if not torch.cuda.is_available():
        refused = speccompile("run", tmp_path / "engine", "--prompt-ids", "1", code=2).stderr
        assert "is a tensorrt engine and runs on an NVIDIA GPU" in " ".join(refused.split())
    sys.modules.pop("tensorrt", None)


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_where_tensorrt_is_missing(target, tmp_path):
    draft = tiny.save_draft(tmp_path / "draft", target)
    options = "--target", target, "--draft", draft, "--out", tmp_path / "engine", "--backend", "tensorrt"
    said = " ".join(speccompile("build", *options, code=2).stderr.split())
    assert "needs the package tensorrt, which is not installed: pip install 'speccompile[tensorrt]'" in said


@pytest.mark.gpu
@built_here
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("family", ["causal-depth", "dflash2"])
def test_on_a_gpu(target, tmp_path, family, plugin):
    """The engine loads (which checks the recorded steps) and emits what the torch back end does at the same dtype."""
    draft = tiny.save_draft(tmp_path / "draft", target, **tiny.FAMILIES[family])
    paths = str(target), str(draft)
    build(BuildOptions(*paths, tmp_path / "rtx", max_seq_len=64, backend="tensorrt-rtx", plugin=plugin))
    build(BuildOptions(*paths, tmp_path / "torch", max_seq_len=64, backend="torch", dtype="float16"))
    engines = [Engine.load(tmp_path / name) for name in ("rtx", "torch")]
    for prompts in ([[3]], [[1, 2, 7], [5, 5], [9] * 20]):
        found, expected = ([r.token_ids for r in engine.generate(prompts, 24)] for engine in engines)
        assert found == expected


def test_the_plugin_is_refused_where_it_is_of_no_use(target, tmp_path, onnx_instead):
    draft = tiny.save_draft(tmp_path / "draft", target)
    options = "--target", target, "--draft", draft, "--out", tmp_path / "engine"
    assert (
        "--plugin is of no use to --backend onnxruntime"
        in speccompile("build", *options, "--plugin", code=2).stderr
    )
    large = tiny.save_target(tmp_path / "large", hidden_size=64, head_dim=288)
    draft = tiny.save_draft(tmp_path / "draft2", large)
    with pytest.raises(
        UserError, match="attends with heads of 288 .* takes equal ones up to 256; leave out --plugin"
    ):
        build(
            BuildOptions(
                str(large), str(draft), tmp_path / "e", max_seq_len=64, backend="tensorrt-rtx", plugin=True
            )
        )
    assert {p.name for p in tmp_path.iterdir()} == {"draft", "large", "draft2"}
