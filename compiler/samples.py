"""Records steps that an engine runs again when it is loaded: the fused program's own, computed by PyTorch at the build.

An engine may be built on another machine than it runs on, and by another compiler; this is how the machine that
serves it finds out that it computes something else. `runtime/self_check.py` is the reader.
"""

import torch
from torch import fx

from speccompile.compiler.sampling import SAMPLING_INPUTS
from speccompile.compiler.stages import flat_copy
from speccompile.passes.program import Program, is_call

CHUNK = 24
CLEAR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Least lead of a chosen token's logit, as a share of the largest logit, for another machine to have to choose it too."""


@torch.no_grad()
def record(
    program: Program,
    caches: dict[str, tuple[int, int]],
    dtype: torch.dtype,
    prompt: torch.Tensor,
    width: int,
    longest: int,
) -> dict[str, torch.Tensor]:
    """Inputs and outputs of some steps, as `samples.safetensors` holds them: `<step>.<tensor>`, one sequence.

    They feed `prompt` [1, n] in two or more chunks of at most `longest` rows, verify the draft's block, verify it
    again with its first proposal right, and go on from there. `<step>.clear` is 0 where the target's choice is too close
    to be held against another machine. `caches` are those of the step: {name: (heads, size)}.
    """
    runner = _Runner(program, caches, dtype, prompt.shape[1] + 3 * width)
    length = 0
    for chunk in prompt.split(min(CHUNK, longest), dim=1):
        rows = chunk.shape[1]
        following = prompt[0, length + rows].item() if length + rows < prompt.shape[1] else -1
        out = runner.step(chunk, rows, length, following)
        length += rows
    block = out["block"]
    out = runner.step(block, 1, length)
    block = torch.cat([block[:, :1], out["emitted"][:, :1], block[:, 2:]], dim=1)
    out = runner.step(block, 1, length)
    runner.step(out["block"], 1, int(out["new_lengths"]))
    return runner.recorded


class _Runner:
    def __init__(
        self, program: Program, caches: dict[str, tuple[int, int]], dtype: torch.dtype, capacity: int
    ):
        graph_module = flat_copy(program.graph_module)
        output = next(n for n in graph_module.graph.nodes if n.op == "output")
        emitted = output.args[0][program.outputs.index("emitted")]
        greedy = emitted.args[1] if is_call(emitted, torch.ops.aten.where.self) else emitted
        output.args = ((*output.args[0], greedy.args[0]),)  # the logits behind the choices [1, K, V]
        self.interpreter = fx.Interpreter(graph_module)
        self.program, self.dtype = program, dtype
        self.caches = {
            name: torch.zeros(1, heads, capacity, size, dtype=dtype) for name, (heads, size) in caches.items()
        }
        width = output.args[0][program.outputs.index("emitted")].meta["val"].shape[1]
        numbers = (
            torch.zeros(1),
            torch.zeros(1, dtype=torch.long),
            torch.ones(1),
            torch.zeros(1),
            torch.zeros(1, width),
        )
        self.greedy = dict(zip(SAMPLING_INPUTS, numbers))
        self.recorded: dict[str, torch.Tensor] = {}
        self.steps = 0

    def step(
        self, tokens: torch.Tensor, known: int, length: int, following: int = -1
    ) -> dict[str, torch.Tensor]:
        given = {
            "tokens": tokens,
            "num_tokens": torch.tensor([tokens.shape[1]]),
            "num_known": torch.tensor([known]),
            "lengths": torch.tensor([length]),
            "next_tokens": torch.tensor([following]),
        } | self.greedy
        inputs = given | self.caches
        *values, logits = self.interpreter.run(*(inputs[name] for name in self.program.inputs))
        out = dict(zip(self.program.outputs, values, strict=True))
        for name, cache in self.program.aliases.items():
            self.caches[cache] = out.pop(name)
        best = logits[0, : int(out["num_emitted"])].float().topk(2, dim=-1).values
        lead = (best[:, 0] - best[:, 1]).min()
        clear = lead > CLEAR[self.dtype] * logits.abs().max()
        kept = {name: value for name, value in given.items() if name not in self.greedy}
        for name, value in (kept | out | {"clear": clear.to(torch.int64)}).items():
            self.recorded[f"{self.steps}.{name}"] = value.clone().contiguous()
        self.steps += 1
        return out
