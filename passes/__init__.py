"""Graph to graph: one file a pass, each a function `Program, … -> how often it matched`.

`COMMON` is the order they run in, before those of the back end (`LOWERINGS`). A pass in `REQUIRED` that matches
nothing is an error of the build.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speccompile.passes.append_and_attend import append_and_attend
from speccompile.passes.append_in_place import append_in_place
from speccompile.passes.drop_noops import drop_noops
from speccompile.passes.fuse_projections import fuse_projections
from speccompile.passes.fuse_rms_norm import fuse_rms_norm
from speccompile.passes.gather_verified_rows import gather_verified_rows
from speccompile.passes.lower_group_query_attention import lower_group_query_attention
from speccompile.passes.one_update_per_cache import one_update_per_cache
from speccompile.passes.program import Program
from speccompile.passes.promote_types import promote_types
from speccompile.passes.share_parameters import share_parameters

Pass = Callable[[Program], int]
COMMON: list[Pass] = [
    drop_noops,
    share_parameters,
    gather_verified_rows,
    fuse_projections,
    fuse_rms_norm,
    promote_types,
]
LOWERINGS: dict[str, list[Pass]] = {
    "onnxruntime": [lower_group_query_attention],
    "tensorrt-rtx": [one_update_per_cache],
    "tensorrt-plugin": [append_and_attend],
    "torch": [append_in_place],
}
REQUIRED = {"gather_verified_rows"}


@dataclass(frozen=True)
class PassResult:
    name: str
    matches: int
    seconds: float


def run_passes(
    program: Program, lowering: str = "onnxruntime", debug_directory: Path | None = None
) -> list[PassResult]:
    """Run the pipeline of a back end in place. With SPECCOMPILE_DEBUG=1 each pass's graph is written as text."""
    results = []
    for position, rewrite in enumerate([*COMMON, *LOWERINGS[lowering]]):
        start = time.perf_counter()
        matches = rewrite(program)
        if not matches and rewrite.__name__ in REQUIRED:
            raise RuntimeError(
                f"Pass {rewrite.__name__} matched nothing; the traced graph has an unexpected form."
            )
        results.append(PassResult(rewrite.__name__, matches, time.perf_counter() - start))
        if os.environ.get("SPECCOMPILE_DEBUG") == "1":
            directory = debug_directory or Path("speccompile-debug")
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{position:02d}-{rewrite.__name__}.txt").write_text(str(program.graph_module.graph))
    return results
