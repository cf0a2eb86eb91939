"""The command line. Commands import what they need when they run, so that `--help` is instant."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from speccompile.compiler import cli_engine
from speccompile.compiler.cli_common import AsJson, EnginePath, TrustRemoteCode, err, out, parse_numbers
from speccompile.export.directory import discard_unfinished
from speccompile.export.errors import UserError

app = typer.Typer(
    name="speccompile",
    help="Compile a target LLM and its block draft into one verify-and-propose engine, and run it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (cli_engine.run, cli_engine.serve, cli_engine.bench, cli_engine.export_triton):
    app.command(command.__name__.replace("_", "-"))(command)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 `verify` found a difference, 2 a user's mistake, 3 our own."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _stop)
    try:
        app()
    except UserError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        if os.environ.get("SPECCOMPILE_DEBUG") == "1":
            raise
        what = str(error).strip().splitlines()[0][:300] if str(error).strip() else "no message"
        err.print(
            f"[bold red]internal error:[/] {escape(type(error).__name__)}: {escape(what)} "
            "This is a defect of speccompile; SPECCOMPILE_DEBUG=1 shows where it happened.",
            soft_wrap=True,
        )
        sys.exit(3)


def _stop(signum: int, frame: object) -> None:
    """End at once, leaving nothing half-written. An exception would not do: code underneath may swallow it."""
    discard_unfinished()
    err.show_cursor()
    os._exit(128 + signum)


@app.command()
def build(
    target: Annotated[
        str, typer.Option(metavar="DIR|HUB-ID", help="Target: a Hugging Face causal LM as safetensors.")
    ],
    draft: Annotated[
        str,
        typer.Option(
            metavar="DIR|HUB-ID",
            help="Draft made for it, as published: DFlash, DFlash 2, JetSpec, DSpark, Domino, xPress, EAGLE-3 or causal-depth "
            "(`speccompile drafts` lists the formats).",
        ),
    ],
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Engine directory to write.")],
    block_width: Annotated[
        int | None,
        typer.Option(
            help="Rows of a block: one anchor and the proposals. \\[default: as the draft was trained]",
            show_default=False,
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens a sequence may hold. \\[default: the target's, at most 2048]", show_default=False
        ),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Sequences decoded together.")] = 8,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of weights and caches: float32 or float16 for onnxruntime, float16 or bfloat16 for tensorrt-rtx, those or float32 for tensorrt and torch. "
            "\\[default: the first]",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="What runs the engine: onnxruntime (CPU), torch (CUDA, or CPU), tensorrt-rtx (NVIDIA GPUs; built without one), or tensorrt (the GPU at hand, with --plugin)."
        ),
    ] = "onnxruntime",
    sm: Annotated[
        str | None,
        typer.Option(
            metavar="89,120",
            help="TensorRT: compute capabilities to build for, among 75, 80, 86, 89, 120 and 121. \\[default: all that have the dtype]",
            show_default=False,
        ),
    ] = None,
    sampling: Annotated[
        bool,
        typer.Option(
            "--sampling",
            help="The engine can sample (temperature, top-k, top-p, min-p, seed), exactly as the target would; it still decodes greedily unless asked.",
        ),
    ] = False,
    plugin: Annotated[
        bool,
        typer.Option(
            "--plugin",
            help="TensorRT: attend with speccompile's plugins (Triton kernels over the valid rows; the runtime is Python) instead of TensorRT's own layers.",
        ),
    ] = False,
    prefill_chunk: Annotated[
        int, typer.Option(help="TensorRT: most prompt tokens of a sequence in one step.")
    ] = 512,
    confidence_threshold: Annotated[
        float | None,
        typer.Option(
            help="Verify proposals only up to the first the draft trusts less than this (DSpark). \\[default: all]",
            show_default=False,
        ),
    ] = None,
    head_candidates: Annotated[
        int | None,
        typer.Option(
            help="Serial heads (DSpark, Domino) score this many of a row's best tokens; 0 scores all. \\[default: as the draft says]",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an engine that is already at --out.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Trace target and draft, fuse them into one step, and write an engine directory.

    Example: speccompile build --target samples/tiny/target --draft samples/tiny/causal-depth --out engines/tiny
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from speccompile.compiler.build import BuildLog, BuildOptions
    from speccompile.compiler.build import build as run_build

    options = BuildOptions(
        target,
        draft,
        out_dir,
        block_width=block_width,
        confidence_threshold=confidence_threshold,
        head_candidates=head_candidates,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        dtype=dtype,
        backend=backend,
        sm=parse_numbers("--sm", sm),
        sampling=sampling,
        plugin=plugin,
        prefill_chunk=prefill_chunk,
        force=force,
        trust_remote_code=trust_remote_code,
    )
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("start", total=None)
        report = run_build(
            options,
            BuildLog(
                announce=lambda stage: progress.update(task, description=stage, completed=0, total=None),
                advance=lambda phase, step, of: progress.update(
                    task, description=phase, completed=step, total=of
                ),
            ),
        )
    if as_json:
        print(json.dumps(report))
    else:
        from speccompile.compiler.tables import print_build

        print_build(out, out_dir, report)


@app.command("init-draft")
def init_draft(
    target: Annotated[
        str,
        typer.Option(metavar="DIR|HUB-ID", help="Target whose sizes, embedding and head the draft takes."),
    ],
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Checkpoint directory to write.")],
    family: Annotated[str, typer.Option(help="causal-depth or dflash.")] = "causal-depth",
    layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 2,
    block_width: Annotated[int, typer.Option(help="Rows of a block: one anchor and the proposals.")] = 8,
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            help="Token that stands for a row to fill. \\[default: the vocabulary's last]", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace what is already at --out.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a random-weight draft for a target, so that a pair can be built before a draft is trained.

    Its proposals are noise: the output stays the target's own, at the speed of plain decoding or below.
    """
    from speccompile.compiler import checkpoint
    from speccompile.compiler.drafts.loading import save_draft
    from speccompile.compiler.init_draft import random_draft
    from speccompile.export.directory import atomic_directory

    config = checkpoint.target_config(checkpoint.resolve(target), trust_remote_code)
    draft = random_draft(config, family, layers, block_width, mask_token_id, seed)
    with atomic_directory(out_dir, force, marker="config.json") as building:
        save_draft(draft, building)
    c = draft.config
    out.print(
        f"Wrote a random {c.family} draft to {out_dir}: {layers} layers, block width {c.block_width}, taps of hidden_states "
        f"{list(c.tapped_hidden_states)}, mask token {c.mask_token_id}.",
        soft_wrap=True,
    )


@app.command()
def drafts(as_json: AsJson = False) -> None:
    """List the drafts that can be built: formats, what they hold, and how each is recognised."""
    from speccompile.compiler.drafts.dialects import DIALECTS

    rows = [{"format": d.name, "families": d.families, "recognised_by": d.recognised_by} for d in DIALECTS]
    if as_json:
        print(json.dumps(rows))
        return
    from speccompile.compiler.tables import print_drafts

    print_drafts(out, rows)


@app.command("convert-draft")
def convert_draft(
    draft: Annotated[
        str, typer.Argument(metavar="DIR|HUB-ID", help="Draft checkpoint in any supported format.")
    ],
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Checkpoint directory to write.")],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB-ID",
            help="Its target: checked against it, and asked for by formats that do not state the target's depth.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is already at --out.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Write a draft of any supported format in speccompile's own: every choice resolved, nothing left to a reader.

    Example: speccompile convert-draft z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B --out drafts/qwen3-8b
    """
    from speccompile.compiler import checkpoint
    from speccompile.compiler.drafts.loading import load_draft, resolve_draft, save_draft
    from speccompile.compiler.tables import print_draft
    from speccompile.export.directory import atomic_directory

    source = checkpoint.resolve(draft)
    served = checkpoint.target_config(checkpoint.resolve(target), trust_remote_code) if target else None
    config = resolve_draft(source, served)
    with atomic_directory(out_dir, force, marker="config.json") as building:
        save_draft(load_draft(source, config, None), building)
    if as_json:
        print(json.dumps({"path": str(out_dir), "family": config.family, **config.to_json()}))
        return
    print_draft(out, config.describe())
    out.print(f"Written to {out_dir}.", soft_wrap=True)


@app.command()
def verify(
    engine: EnginePath,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one a line: text, or JSON with `prompt` or `prompt_ids`. \\[default: built-in]",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option("-n", "--num-prompts", help="Most prompts to check.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB-ID",
            help="Target to compare with. \\[default: the one it was built from]",
            show_default=False,
        ),
    ] = None,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            help="Logits nearer than this share of the largest are a tie. \\[default: by dtype]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that the engine's greedy output is the target's own: exit code 0 if it is, 1 if not.

    Compares every token with Transformers in eager mode on the original target, and speculation with plain
    decoding. A difference where two logits are equal to within rounding is reported as a near tie, with both logits.
    """
    from rich.progress import Progress

    from speccompile.compiler.run import builtin_prompts
    from speccompile.compiler.verify import load_original_target, read_prompts
    from speccompile.compiler.verify import verify as run_verify
    from speccompile.runtime import Engine
    from speccompile.runtime.tokenizer import load_tokenizer

    loaded = Engine.load(engine)
    if prompts is not None:
        ids = read_prompts(prompts, lambda text: load_tokenizer(loaded.directory).encode(text))
    else:
        ids = builtin_prompts(loaded)
    ids = ids[:num_prompts]
    model = load_original_target(loaded, target)
    with Progress(console=err, transient=True, disable=as_json) as progress:
        task = progress.add_task("comparing", total=len(ids))
        outcome = run_verify(
            loaded, model, ids, max_new_tokens, tie_tolerance, lambda index: progress.advance(task)
        )
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        from speccompile.compiler.tables import print_verification

        print_verification(out, outcome)
    if outcome.failures:
        raise typer.Exit(1)


@app.command()
def inspect(
    engine: EnginePath,
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the step's graph for people: .html, .txt, or .onnx (without weights)."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what an engine is: contract, operations, caches, memory, and how it was built."""
    from speccompile.compiler.inspect import describe, write_graph
    from speccompile.export.directory import open_engine

    loaded = open_engine(engine)
    if graph is not None:
        write_graph(loaded, graph)
        err.print(f"Wrote {graph}.", soft_wrap=True)
    description = describe(loaded)
    if as_json:
        print(json.dumps(description))
    else:
        from speccompile.compiler.tables import print_description

        print_description(out, description)


@app.command()
def port(
    launch: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND|FILE",
            help="The launch in quotes, or a file that holds it: script, Dockerfile, Kubernetes, Compose or configuration YAML.",
        ),
    ],
    backend: Annotated[str, typer.Option(help="As for `build`: torch runs where SGLang does.")] = "torch",
    to: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Engine directory in the commands.")
    ] = "engines/ported",
    as_json: AsJson = False,
) -> None:
    """Turn an SGLang, vLLM or TensorRT-LLM launch with a draft into the commands that do the same here.

    Example: speccompile port "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"
    """
    from speccompile.compiler import backends
    from speccompile.compiler.port import port as porting
    from speccompile.compiler.port.launch import find_launch
    from speccompile.compiler.tables import print_port

    backends.choose(backend)
    ported = porting.port(find_launch(launch), backend, to)
    described = porting.as_json(ported, to)
    if as_json:
        print(json.dumps(described))
    else:
        print_port(out, described)


if __name__ == "__main__":
    main()
