"""Compares drafts of one target: draft time against block width, acceptance against position, from measured steps.

    python samples/tiny/compare.py --out engines/compare        (about 3 minutes on two cores)

Without arguments it takes the tiny pair's three drafts and held-out prompts. Your own:

    python samples/tiny/compare.py --target T --draft eagle3=D1 --draft dflash=D2 --prompts prompts.txt --out compare

Draft time is what a fused step takes longer than the same step with everything cut away that the target's own outputs
do not need, the two run in turn. Writes comparison.json, .md and .png.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnx
from onnx.utils import Extractor

from speccompile.compiler.build import BuildOptions, build
from speccompile.compiler.verify import read_prompts
from speccompile.export.directory import STEP, EngineDirectory, open_engine
from speccompile.runtime import Engine
from speccompile.runtime.session import OnnxSession
from speccompile.runtime.tokenizer import load_tokenizer

HERE = Path(__file__).parent
DRAFTS = {name: HERE / name for name in ("eagle3", "dflash", "causal-depth")}
PROMPT, CONTEXT, WARM_UP = 32, 128, 10
"""Tokens of a held-out prompt, committed tokens before a timed step, and steps run before the first timed one."""


def held_out_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Windows of the topics that `make.py` kept from the target and the drafts."""
    encoded = [encode(topics[name]) for name in sorted(topics)[::20]]
    starts = range(0, 2000, 200)
    return [ids[at : at + PROMPT] for ids in encoded for at in starts if len(ids) >= at + PROMPT]


def acceptance(engine: Engine, prompts: list[list[int]], tokens: int) -> dict:
    """Mean tokens a step, and by position: the share of steps that accepted it, and that share given the one before."""
    lengths = []
    for prompt in prompts:
        lengths += engine.generate([prompt], tokens)[0].acceptance_lengths[:-1]  # the budget cuts the last
    accepted = [sum(n > r for n in lengths) for r in range(engine.directory.settings["block_width"])]
    return {
        "steps": len(lengths),
        "acceptance_length": sum(lengths) / len(lengths),
        "accepted": [count / len(lengths) for count in accepted[1:]],
        "accepted_given_previous": [b / a if a else None for a, b in zip(accepted, accepted[1:])],
    }


def verify_only(engine: EngineDirectory, out: Path) -> EngineDirectory:
    """The engine without what only the draft needs: the part of its graph that the target's own outputs ask for."""
    shutil.copytree(engine.path, out)
    aliases = {
        o: cache for o, cache in engine.settings["aliases"][STEP].items() if cache.startswith("target.")
    }
    model = onnx.load(engine.path / STEP, load_external_data=False)
    inputs = [
        i.name for i in model.graph.input if not i.name.startswith("draft.") and i.name != "next_tokens"
    ]
    part = Extractor(model).extract_model(inputs, ["emitted", "num_emitted", "new_lengths", *aliases])
    onnx.save(part, out / STEP)
    settings = engine.settings | {"aliases": engine.settings["aliases"] | {STEP: aliases}}
    return EngineDirectory(out, engine.config | {"speccompile": settings})


def time_steps(path: Path, threads: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds of decode steps at batch 1 after CONTEXT tokens, with and without the draft, run in turn."""
    engine = open_engine(path)
    width = engine.settings["block_width"]
    step = (np.arange(width)[None], np.array([width]), np.array([1]), np.array([CONTEXT]), np.array([-1]))
    with tempfile.TemporaryDirectory() as scratch:
        directories = engine, verify_only(engine, Path(scratch) / "verify")
        whole, target = (OnnxSession(directory, 1, threads=threads) for directory in directories)

        def seconds(session: OnnxSession) -> float:
            start = time.perf_counter()
            session.step(*step)
            return time.perf_counter() - start

        pairs = [(seconds(whole), seconds(target)) for _ in range(repeats + WARM_UP)]
    return pairs[WARM_UP:]


def compare(target: str, drafts: dict[str, str], scratch: Path, options: argparse.Namespace) -> dict:
    """Build every draft at its own width and the others; measure acceptance at its own, times at all asked for."""
    results: dict = {
        "target": Path(target).name,
        "widths": options.widths,
        "new_tokens": options.tokens,
        "threads": options.threads,
        "drafts": {},
    }
    engines: dict[tuple[str, int], Path] = {}
    for name, draft in drafts.items():

        def built(width: int | None, name=name, draft=draft) -> tuple[Path, dict]:
            path = scratch / f"{name}-{width or 'own'}"
            return path, build(BuildOptions(target, draft, path, block_width=width, max_seq_len=512))

        own, report = built(None)
        engine = Engine.load(own, options.threads)
        encode = load_tokenizer(engine.directory).encode
        prompts = read_prompts(options.prompts, encode) if options.prompts else held_out_prompts(encode)
        record = {"family": report["draft"]["family"], "prompts": len(prompts)}
        results["drafts"][name] = record | acceptance(engine, prompts, options.tokens)
        own_width = engine.directory.settings["block_width"]
        for width in options.widths:
            engines[name, width] = own if width == own_width else built(width)[0]
        print(f"{name}: {results['drafts'][name]['steps']} steps measured, built at every width", flush=True)

    # Every engine has its turn in every round, so that a machine that slows down for a while slows them all.
    pairs: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in engines}
    for _ in range(options.rounds):
        for key, path in engines.items():
            pairs[key] += time_steps(path, options.threads, options.repeats)
    for (name, width), timed in pairs.items():
        whole, draft = statistics.median(a for a, _ in timed), statistics.median(a - b for a, b in timed)
        results["drafts"][name].setdefault("times", {})[width] = {"step_s": whole, "draft_s": draft}
    return results


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(results: dict) -> str:
    """The results as Markdown."""
    lines = [
        "| draft | tokens a step (steps) | accepted at proposal 1 … | … given the one before |",
        "|---|---|---|---|",
    ]
    for name, d in results["drafts"].items():
        shares, given = (" ".join(map(_share, d[key])) for key in ("accepted", "accepted_given_previous"))
        lines.append(f"| {name} | {d['acceptance_length']:.2f} ({d['steps']}) | {shares} | {given} |")
    lines += [
        "",
        "| draft: ms of a step (of it drafting) | " + " | ".join(f"K={w}" for w in results["widths"]) + " |",
    ]
    lines.append("|---" * (1 + len(results["widths"])) + "|")
    for name, d in results["drafts"].items():
        cells = [f"{1e3 * t['step_s']:.2f} ({1e3 * t['draft_s']:.2f})" for t in d["times"].values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(results: dict, file: Path) -> None:
    """Two panels: draft time against width, acceptance against position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name, d in results["drafts"].items():
        panels[0].plot(
            list(d["times"]), [1e3 * t["draft_s"] for t in d["times"].values()], marker="o", label=name
        )
        for axes, key in zip(panels[1:], ("accepted", "accepted_given_previous"), strict=True):
            shares = [np.nan if share is None else share for share in d[key]]
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    panels[0].set(xlabel="block width K", ylabel="ms per step", title="Draft time", ylim=(0, None))
    panels[0].set_xticks(results["widths"])
    panels[1].set(xlabel="position of the proposal", title="Share of steps that accept it", ylim=(0, 1))
    panels[2].set(
        xlabel="position of the proposal", title="Share, given the one before is accepted", ylim=(0, 1)
    )
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for comparison.json, .md and .png")
    parser.add_argument("--target", default=str(HERE / "target"))
    parser.add_argument(
        "--draft", action="append", metavar="NAME=DIR", help="a draft to compare; give several"
    )
    parser.add_argument(
        "--prompts", type=Path, help="one a line, text or JSON; default: the tiny pair's held-out ones"
    )
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument(
        "--widths", type=lambda text: [int(w) for w in text.split(",")], default=[2, 4, 8, 16]
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100, help="timed steps of an engine in a round")
    parser.add_argument("--rounds", type=int, default=10, help="turns that every engine has")
    options = parser.parse_args()
    drafts = (
        dict(entry.split("=", 1) for entry in options.draft)
        if options.draft
        else {n: str(d) for n, d in DRAFTS.items()}
    )
    with tempfile.TemporaryDirectory() as scratch:
        results = compare(options.target, drafts, Path(scratch), options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "comparison.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "comparison.md").write_text(table(results))
    plot(results, options.out / "comparison.png")
    print(table(results))


if __name__ == "__main__":
    main()
