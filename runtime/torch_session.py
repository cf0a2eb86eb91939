"""One step of an engine in PyTorch: caches on the device, written in place; on CUDA every decode step is one CUDA graph."""

import json

import numpy as np
import torch
from safetensors.torch import load_file

from speccompile.export.directory import EngineDirectory
from speccompile.plugins.block_attention import append_and_attend  # noqa: F401  registers the ops
from speccompile.runtime.session import Sampling, StepOutput, check_batch, small_inputs

WARM_UP = 3


class TorchSession:
    """The fused step (`plain=False`) or plain decoding of a `torch` engine, for a fixed number of sequences.

    The device is CUDA where PyTorch finds one, else the CPU.
    """

    def __init__(self, engine: EngineDirectory, batch: int, plain: bool = False, threads: int = 0):
        settings = engine.settings
        check_batch(batch, settings)
        if threads:
            torch.set_num_threads(threads)
        self.batch, self.plain = batch, plain
        self.width = 1 if plain else settings["block_width"]
        self.capacity, self.max_seq_len = settings["capacity"], settings["max_seq_len"]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        extra = {"contract.json": ""}
        program = torch.export.load(
            engine.path / settings["plain_file" if plain else "step_file"], extra_files=extra
        )
        if self.device.type != "cpu":
            program = torch.export.passes.move_to_device_pass(program, self.device)
        self.module = program.module(check_guards=False)
        self.contract = json.loads(extra["contract.json"])
        weights = load_file(engine.path / settings["weights_file"], device=str(self.device))
        self.weights = [weights[name] for name in self.contract["weights"]]
        dtype = getattr(torch, settings["dtype"])
        self.caches = {
            name: torch.zeros(
                batch, shape["heads"], self.capacity, shape["size"], dtype=dtype, device=self.device
            )
            for name, shape in settings["caches"].items()
            if name in self.contract["inputs"]
        }
        self.graphs: dict[int, _Captured] = {}

    @property
    def row_limit(self) -> int:
        """The last cache row a step's tokens may reach; behind it lies room for the draft's block."""
        return self.capacity - (0 if self.plain else self.width)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one sequence's caches to another's."""
        for cache in self.caches.values():
            cache[target, :, :rows] = cache[source, :, :rows]

    @torch.no_grad()
    def step(
        self,
        tokens: np.ndarray,
        num_tokens: np.ndarray,
        num_known: np.ndarray,
        lengths: np.ndarray,
        next_tokens: np.ndarray,
        sampling: Sampling | None = None,
    ) -> StepOutput:
        """Run one step, as `OnnxSession.step`."""
        arguments = tokens, num_tokens, num_known, lengths, next_tokens, sampling
        small = small_inputs(self, self.contract["inputs"], *arguments)
        host = {name: torch.from_numpy(value) for name, value in small.items()}
        rows = tokens.shape[1]
        if self.device.type == "cuda" and rows == self.width:
            if rows not in self.graphs:
                self.graphs[rows] = _Captured(self, host)
            outputs = self.graphs[rows].replay(host)
        else:
            outputs = self.run({name: value.to(self.device) for name, value in host.items()})
        values = {name: value.to("cpu", non_blocking=True) for name, value in outputs.items()}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return StepOutput(**{name: value.numpy() for name, value in values.items()})

    def run(self, small: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inputs = small | self.caches
        outputs = self.module(*(inputs[name] for name in self.contract["inputs"]), *self.weights)
        return dict(zip(self.contract["outputs"], outputs, strict=True))


class _Captured:
    """A step at one number of rows as a CUDA graph. Warming up repeats the step, which writes the same rows again."""

    def __init__(self, session: TorchSession, host: dict[str, torch.Tensor]):
        self.inputs = {name: value.to(session.device) for name, value in host.items()}
        self.pinned = {name: value.pin_memory() for name, value in host.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                session.run(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = session.run(self.inputs)

    def replay(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, value in host.items():
            self.pinned[name].copy_(value)
            self.inputs[name].copy_(self.pinned[name], non_blocking=True)
        self.graph.replay()
        return self.outputs
