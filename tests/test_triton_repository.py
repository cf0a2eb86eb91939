"""`export-triton`: read with Triton's own protobuf, and run as its text says, it decodes as the engine does."""

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import tiny
from shell import speccompile

text_format = pytest.importorskip("google.protobuf.text_format")


@pytest.fixture(scope="module")
def model_config():
    """`tritonclient`'s message class; its module is loaded alone, since the package around it asks for gRPC."""
    package = importlib.util.find_spec("tritonclient")
    if package is None:
        pytest.skip(
            "`pip install --no-deps tritonclient` brings Triton's protobuf"
        )  # the test command installs it
    file = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Emulated:
    """A sequence on the server: inputs and outputs as configured, states kept from step to step."""

    def __init__(self, folder, config, types):
        self.session = ort.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        self.config = config
        self.states = {
            s.input_name: np.zeros((1, *s.initial_state[0].dims), types[s.initial_state[0].data_type])
            for s in config.sequence_batching.state
        }
        assert all(s.initial_state[0].zero_data for s in config.sequence_batching.state)
        declared = {i.name for i in self.session.get_inputs()}
        assert declared == {i.name for i in config.input} | set(self.states)

    def request(self, **given):
        feeds = {i.name: np.array([given[i.name]]) for i in self.config.input}
        for tensor in self.config.input:
            dims = tensor.dims if not tensor.HasField("reshape") else tensor.reshape.shape
            assert len(feeds[tensor.name].shape) == 1 + len(dims)
        names = [o.name for o in self.config.output]
        states = {s.output_name: s.input_name for s in self.config.sequence_batching.state}
        values = dict(zip([*names, *states], self.session.run([*names, *states], feeds | self.states)))
        for output, state in states.items():
            self.states[state] = values[output]
        return {name: values[name][0] for name in names}


@pytest.mark.parametrize("family", ["causal-depth", "eagle3"])
def test_the_repository_decodes_as_the_engine_does(pairs, tmp_path, model_config, family):
    pair = pairs(draft=tiny.FAMILIES[family])
    said = speccompile(
        "export-triton", pair.engine.directory.path, "--out", tmp_path, "--name", "pair"
    ).stdout
    assert "tritonserver --model-repository" in " ".join(said.split())
    config = text_format.Parse((tmp_path / "pair" / "config.pbtxt").read_text(), model_config.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("pair", "onnxruntime", 8)
    assert len(config.sequence_batching.state) == 2 * (4 + 2)
    types = {model_config.TYPE_FP32: np.float32, model_config.TYPE_INT64: np.int64}
    sequence = Emulated(tmp_path / "pair", config, types)
    prompt, produced = [3, 1, 2, 5, 9], []
    out = sequence.request(tokens=prompt[:3], num_tokens=3, num_known=3, lengths=0, next_tokens=prompt[3])
    out = sequence.request(tokens=prompt[3:], num_tokens=2, num_known=2, lengths=3, next_tokens=-1)
    while len(produced) < 20:
        produced += out["emitted"][: out["num_emitted"]].tolist()
        block = out["block"]
        out = sequence.request(
            tokens=block, num_tokens=len(block), num_known=1, lengths=out["new_lengths"], next_tokens=-1
        )
    assert produced[:20] == pair.engine.generate([prompt], 20)[0].token_ids


def test_what_cannot_be_written(pairs, tmp_path):
    path = pairs(draft=tiny.FAMILIES["causal-depth"]).engine.directory.path
    speccompile("export-triton", path, "--out", tmp_path, "--name", "pair")
    assert (
        "already exists"
        in speccompile("export-triton", path, "--out", tmp_path, "--name", "pair", code=2).stderr
    )
    speccompile("export-triton", path, "--out", tmp_path, "--name", "pair", "--force")
    assert (
        "is no name" in speccompile("export-triton", path, "--out", tmp_path, "--name", "../x", code=2).stderr
    )
    torch_path = pairs(
        draft=tiny.FAMILIES["causal-depth"], backend="torch", dtype="float32"
    ).engine.directory.path
    said = speccompile("export-triton", torch_path, "--out", tmp_path, "--name", "t", code=2).stderr
    assert "is an engine for torch" in " ".join(said.split()) and not (tmp_path / "t").exists()
