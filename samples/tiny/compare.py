"""Compares drafts of one target: draft time against block width, acceptance against position, from measured steps.

    python samples/tiny/compare.py --out engines/compare        (about 3 minutes on two cores)

Without arguments it takes the tiny pair's three drafts and held-out prompts. Your own:

    python samples/tiny/compare.py --target T --draft eagle3=D1 --draft dflash=D2 --prompts prompts.txt --out compare

Draft time is the time ONNX Runtime's profile gives to the nodes of the fused step that the target's own outputs do not
need: injection and proposal, heads included, the time between nodes not. Writes comparison.json, .md and .png.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnx
import onnxruntime as ort

from speccompile.compiler.build import BuildOptions, build
from speccompile.compiler.verify import read_prompts
from speccompile.export.directory import STEP
from speccompile.runtime import Engine
from speccompile.runtime.session import OnnxSession
from speccompile.runtime.tokenizer import load_tokenizer

HERE = Path(__file__).parent
DRAFTS = {name: HERE / name for name in ("eagle3", "dflash", "causal-depth")}
PROMPT, CONTEXT = 32, 128
"""Tokens of a held-out prompt, and committed tokens before a timed step."""


def held_out_prompts(tokenizer) -> list[list[int]]:
    """Windows of the topics that `make.py` kept from the target and the drafts."""
    encoded = [tokenizer.encode(topics[name]) for name in sorted(topics)[::20]]
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


def needed_nodes(model: onnx.ModelProto, outputs: Iterable[str]) -> set[str]:
    """Names of the nodes that these outputs need."""
    producer = {value: node for node in model.graph.node for value in node.output}
    found, waiting = set(), list(outputs)
    while waiting:
        node = producer.get(waiting.pop())
        if node is not None and node.name not in found:
            found.add(node.name)
            waiting += node.input
    return found


def time_step(path: Path, threads: int, repeats: int) -> dict[str, float]:
    """Median seconds of a whole decode step at batch 1, after CONTEXT tokens, and of the draft's part in it."""
    engine = Engine.load(path, threads)
    width = engine.directory.settings["block_width"]
    step = (np.arange(width)[None], np.array([width]), np.array([1]), np.array([CONTEXT]), np.array([-1]))
    plain = OnnxSession(engine.directory, 1, threads=threads)
    with tempfile.TemporaryDirectory() as scratch:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(scratch) / "profile")
        options.optimized_model_filepath = str(Path(scratch) / "optimised.onnx")  # fusions rename nodes
        profiled = OnnxSession(engine.directory, 1, threads=threads, options=options)
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
        walls = []
        for _ in range(repeats):
            profiled.step(*step)
            start = time.perf_counter()
            plain.step(*step)
            walls.append(time.perf_counter() - start)
        events = json.loads(Path(profiled.session.end_profiling()).read_text())
    aliases = engine.directory.settings["aliases"][STEP]
    caches = [output for output, cache in aliases.items() if cache.startswith("target.")]
    verifying = needed_nodes(model, ["emitted", "num_emitted", "new_lengths", *caches])
    drafting: dict[str, list[float]] = {}
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if name != event["name"] and name not in verifying:
            drafting.setdefault(name, []).append(event["dur"] / 1e6)
    draft = sum(statistics.median(times) for times in drafting.values())
    return {"step_s": statistics.median(walls), "draft_s": draft}


def compare(
    target: str,
    drafts: dict[str, str],
    prompts: Path | None,
    tokens: int,
    widths: list[int],
    threads: int,
    repeats: int,
    scratch: Path,
) -> dict:
    """Build every draft at every width; measure times at all widths and acceptance at the draft's own."""
    results: dict = {
        "target": Path(target).name,
        "widths": widths,
        "new_tokens": tokens,
        "threads": threads,
        "drafts": {},
    }
    for name, draft in drafts.items():
        times, report = {}, None
        for width in (None, *widths):
            path = scratch / f"{name}-{width or 'own'}"
            report = build(BuildOptions(target, draft, path, block_width=width, max_seq_len=512))
            if width is not None:
                times[width] = time_step(path, threads, repeats)
                continue
            engine = Engine.load(path, threads)
            tokenizer = load_tokenizer(engine.directory)
            ids = read_prompts(prompts, tokenizer.encode) if prompts else held_out_prompts(tokenizer)
            results["drafts"][name] = {
                "family": report["draft"]["family"],
                "prompts": len(ids),
                **acceptance(engine, ids, tokens),
            }
        results["drafts"][name]["times"] = times
        print(f"{name}: measured", flush=True)
    return results


def table(results: dict) -> str:
    """The results as Markdown."""
    lines = [
        "| draft | acceptance length | accepted at proposal 1 …, given the one before |",
        "|---|---|---|",
    ]
    for name, d in results["drafts"].items():
        given = " ".join("–" if a is None else f"{a:.2f}" for a in d["accepted_given_previous"])
        lines.append(f"| {name} | {d['acceptance_length']:.2f} over {d['steps']} steps | {given} |")
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

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, d in results["drafts"].items():
        left.plot(list(d["times"]), [1e3 * t["draft_s"] for t in d["times"].values()], marker="o", label=name)
        given = d["accepted_given_previous"]
        right.plot(
            range(1, len(given) + 1), [np.nan if a is None else a for a in given], marker="o", label=name
        )
    left.set(
        xlabel="block width K",
        ylabel="draft time per step, ms",
        xticks=results["widths"],
        ylim=(0, None),
        title="Draft time",
    )
    right.set(
        xlabel="position of the proposal",
        ylabel="accepted, given the one before",
        ylim=(0, 1),
        title="Acceptance",
    )
    for axes in (left, right):
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
    parser.add_argument("--repeats", type=int, default=200, help="timed steps a width")
    options = parser.parse_args()
    drafts = (
        dict(entry.split("=", 1) for entry in options.draft)
        if options.draft
        else {n: str(d) for n, d in DRAFTS.items()}
    )
    with tempfile.TemporaryDirectory() as scratch:
        results = compare(
            options.target,
            drafts,
            options.prompts,
            options.tokens,
            options.widths,
            options.threads,
            options.repeats,
            Path(scratch),
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "comparison.json").write_text(json.dumps(results, indent=2) + "\n")
    (options.out / "comparison.md").write_text(table(results))
    plot(results, options.out / "comparison.png")
    print(table(results))


if __name__ == "__main__":
    main()
