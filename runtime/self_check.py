"""Runs an engine's recorded steps again, so that a machine which computes something else says so before it serves."""

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from speccompile.export.directory import SAMPLES, EngineDirectory
from speccompile.export.errors import UserError

INPUTS = ("tokens", "num_tokens", "num_known", "lengths", "next_tokens")
AGREEMENT = {"float32": 0.9, "float16": 0.6, "bfloat16": 0.6}
"""Least share of equal proposals: a draft's choices may be close, and their margins are not recorded."""


def self_check(session, engine: EngineDirectory) -> None:
    """Run `samples.safetensors` through a session. Raises UserError if it computes something else.

    The target's choices must be those recorded, wherever these are clear; of the draft's proposals, `AGREEMENT` of them.
    The caches are left dirty, which no step minds: what is valid of them goes by `lengths`.
    """
    steps = _steps(engine)
    equal = []
    for index, step in enumerate(steps):
        out = session.step(*(np.repeat(step[name], session.batch, axis=0) for name in INPUTS))
        if not step["clear"].item():
            continue
        count = 1 if session.plain else step["num_emitted"].item()
        wanted = step["emitted"][0, :count]
        for found in out.emitted[:, :count]:
            if not np.array_equal(found, wanted):
                raise UserError(
                    f"{engine.path} does not compute what its build recorded: step {index} of {SAMPLES} gave tokens {found.tolist()}, "
                    f"{wanted.tolist()} were expected; do not serve it here, build it again on this machine."
                )
        if not session.plain:
            equal.append(out.block[:, 1:] == step["block"][:, 1:])
    share = float(np.mean(equal)) if equal else 1.0
    if share < AGREEMENT[engine.settings["dtype"]]:
        raise UserError(
            f"{engine.path} drafts something else than its build recorded in {SAMPLES}: {share:.0%} of the proposals are equal, at least "
            f"{AGREEMENT[engine.settings['dtype']]:.0%} was expected; its text would be right but slow, so build it again on this machine."
        )


def _steps(engine: EngineDirectory) -> list[dict[str, np.ndarray]]:
    path = engine.path / SAMPLES
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); build the engine again.") from None
    steps: dict[int, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        index, tensor = name.split(".", 1)
        steps.setdefault(int(index), {})[tensor] = value
    return [steps[index] for index in sorted(steps)]
