"""One step of an engine on ONNX Runtime, with every cache bound in place.

Cache buffers are allocated once per session and bound as input and output of the same step, so nothing of
a cache is copied; only the small outputs are read back.
"""

from dataclasses import dataclass

import numpy as np
import onnxruntime as ort

from speccompile.export.directory import EngineDirectory
from speccompile.export.errors import UserError
from speccompile.runtime.params import MOST_LOGPROBS


@dataclass(frozen=True)
class StepOutput:
    """`emitted` [B, K], `num_emitted` [B], `new_lengths` [B], `block` [B, K] (None from a plain step); int64. Where the
    draft predicts it, `confidence` [B, K-1] float32, and, where the engine cuts blocks by it, `num_proposed` [B]."""

    emitted: np.ndarray
    num_emitted: np.ndarray
    new_lengths: np.ndarray
    block: np.ndarray | None = None
    confidence: np.ndarray | None = None
    num_proposed: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    """With `--sampling`: [B, K] of the emitted tokens, and the likeliest tokens [B, K, 20] with theirs."""
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class Sampling:
    """How each sequence of a step draws its tokens, for engines built with `--sampling`: `temperature` (0: greedy), `top_p`,
    `min_p` [B] float32, `top_k` [B] int64 (0: all), `uniforms` [B, K] float32 in [0, 1)."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniforms: np.ndarray

    @classmethod
    def greedy(cls, batch: int, width: int) -> "Sampling":
        zeros, ones = np.zeros(batch, np.float32), np.ones(batch, np.float32)
        return cls(zeros, np.zeros(batch, np.int64), ones, zeros.copy(), np.zeros((batch, width), np.float32))


def small_inputs(
    session, names, tokens, num_tokens, num_known, lengths, next_tokens, sampling
) -> dict[str, np.ndarray]:
    """The step's inputs but caches, as far as `names` has them, contiguous and in their types."""
    given = {
        "tokens": tokens, "num_tokens": num_tokens, "num_known": num_known, "lengths": lengths, "next_tokens": next_tokens,
    }  # fmt: skip
    given = {name: np.ascontiguousarray(value, dtype=np.int64) for name, value in given.items()}
    given |= vars(sampling or Sampling.greedy(session.batch, session.width))
    return {name: value for name, value in given.items() if name in names}


def check_batch(batch: int, settings: dict) -> None:
    if batch > settings["max_batch_size"]:
        raise UserError(
            f"A batch of {batch} is more than this engine was built for (--max-batch-size {settings['max_batch_size']})."
        )


REAL_OUTPUTS = ("confidence", "logprobs", "top_logprobs")


def output_shapes(batch: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Of `StepOutput`'s fields, as far as an engine has them."""
    best = batch, width, min(MOST_LOGPROBS, vocabulary)
    return {
        "emitted": (batch, width),
        "num_emitted": (batch,),
        "new_lengths": (batch,),
        "block": (batch, width),
        "confidence": (batch, width - 1),
        "num_proposed": (batch,),
        "logprobs": (batch, width),
        "top_tokens": best,
        "top_logprobs": best,
    }


class OnnxSession:
    """The fused step (`plain=False`) or plain decoding of an engine directory, for a fixed number of sequences."""

    def __init__(self, engine: EngineDirectory, batch: int, plain: bool = False, threads: int = 0):
        settings = engine.settings
        check_batch(batch, settings)
        self.batch, self.plain = batch, plain
        self.width = 1 if plain else settings["block_width"]
        self.capacity, self.max_seq_len = settings["capacity"], settings["max_seq_len"]
        name = settings["plain_file" if plain else "step_file"]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        self.session = ort.InferenceSession(engine.path / name, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        dtype = np.dtype(settings["dtype"])
        present = {value.name for value in self.session.get_inputs()}
        self.arrays = {
            cache: np.zeros((batch, shape["heads"], self.capacity, shape["size"]), dtype)
            for cache, shape in settings["caches"].items()
            if cache in present
        }
        self.caches = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self.arrays.items()}
        for cache, buffer in self.caches.items():
            self.binding.bind_ortvalue_input(cache, buffer)
        for output, cache in settings["aliases"][name].items():
            self.binding.bind_ortvalue_output(output, self.caches[cache])
        self.small = present - set(self.caches)
        returned = {value.name for value in self.session.get_outputs()}
        self.outputs = {
            n: ort.OrtValue.ortvalue_from_numpy(
                np.zeros(shape, np.float32 if n in REAL_OUTPUTS else np.int64)
            )
            for n, shape in output_shapes(batch, self.width, settings["vocab_size"]).items()
            if n in returned
        }
        for output, buffer in self.outputs.items():
            self.binding.bind_ortvalue_output(output, buffer)

    @property
    def row_limit(self) -> int:
        """The last cache row a step's tokens may reach; behind it lies room for the draft's block."""
        return self.capacity - (0 if self.plain else self.width)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one sequence's caches to another's."""
        for cache in self.arrays.values():
            cache[target, :, :rows] = cache[source, :, :rows]

    def step(
        self,
        tokens: np.ndarray,
        num_tokens: np.ndarray,
        num_known: np.ndarray,
        lengths: np.ndarray,
        next_tokens: np.ndarray,
        sampling: Sampling | None = None,
    ) -> StepOutput:
        """Run one step. `tokens` [B, S], the rest [B], all int64; no sequence's `lengths + S` may pass `row_limit`.

        `next_tokens` holds the token after the known ones where it is given too, else -1; only chain drafts ask for it.
        Without `sampling` the step is greedy.
        """
        arguments = tokens, num_tokens, num_known, lengths, next_tokens, sampling
        for name, value in small_inputs(self, self.small, *arguments).items():
            self.binding.bind_cpu_input(name, value)
        self.session.run_with_iobinding(self.binding)
        values = {
            name: buffer.numpy().copy() for name, buffer in self.outputs.items()
        }  # the next step writes there
        return StepOutput(**values)
