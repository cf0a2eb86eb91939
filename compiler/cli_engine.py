"""Commands that use an engine: `run`, `serve` and `bench`. They import what they need when they run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from speccompile.compiler.cli_common import AsJson, EnginePath, err, out, parse_numbers
from speccompile.export.errors import UserError


def run(
    engine: EnginePath,
    prompt: Annotated[str | None, typer.Option(help="Text to continue (with --chat: to answer).")] = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="Token ids to continue.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the chat template; without --prompt, talk line by line.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to produce.")] = 128,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Plain decoding, one row a step: the yardstick.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="Above 0 samples, from an engine built with --sampling.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many of the likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens that make up this mass.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Sample among tokens at least this likely, as a share of the likeliest.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="The same seed gives the same text, with and without speculation.", show_default=False
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text (may be repeated).", show_default=False)
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 lets ONNX Runtime choose.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate from an engine, greedily unless told otherwise, and say how many tokens each step gave."""
    from speccompile.compiler.run import converse, generate_one
    from speccompile.runtime import Engine, SamplingParams

    if (prompt is not None) + (prompt_ids is not None) > 1 or not (
        chat or prompt is not None or prompt_ids is not None
    ):
        raise UserError("Give one of --prompt TEXT, --prompt-ids 1,2,3 or --chat.")
    if chat and prompt_ids is not None:
        raise UserError("--chat needs text, not --prompt-ids.")
    if as_json and (stream or (chat and prompt is None)):
        raise UserError(
            "--json prints one object at the end; it does not go with --stream or an open --chat."
        )
    ids = None if prompt_ids is None else list(parse_numbers("--prompt-ids", prompt_ids))
    loaded = Engine.load(engine, threads)
    params = SamplingParams(
        max_new_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop or ()), ignore_eos=ignore_eos
    )
    if chat and prompt is None:
        converse(loaded, out, params, not no_speculation)
        return
    answer = generate_one(loaded, prompt, ids, chat, params, not no_speculation, stream)
    summary = answer.pop("summary")
    if as_json:
        print(json.dumps(answer))
        return
    if not stream:
        print(answer["text"] if answer["text"] is not None else ",".join(map(str, answer["token_ids"])))
    err.print(summary, style="dim", soft_wrap=True)


def serve(
    engine: EnginePath,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model. \\[default: the engine directory's name]", show_default=False
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences at a time. \\[default: the build's --max-batch-size]", show_default=False
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SPECCOMPILE_API_KEY",
            help="Ask clients for it; the variable keeps it out of process lists.",
            show_default=False,
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests in the queue; more are answered 429.")
    ] = 256,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest body; larger ones are answered 413.")
    ] = 4194304,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds a request may take, its wait included.")
    ] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that running requests get after SIGTERM.")] = 30.0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 lets the back end choose.")] = 0,
) -> None:
    """Serve an engine with the OpenAI API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

    Example: speccompile serve engines/mine --port 8000
    """
    try:
        import uvicorn

        from speccompile.runtime.server import ServerOptions, create_app
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'speccompile[serve]'.") from None
    from speccompile.runtime import Engine

    loaded = Engine.load(engine, threads)
    name = model_name or engine.resolve().name
    options = ServerOptions(name, api_key, max_body_bytes, max_waiting, request_timeout, drain)
    with err.status("loading the engine"):
        _ = loaded.tokenizer
        application = create_app(loaded, options, slots)
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=max(1, round(drain)) + 5,
    )
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    address = f"http://{host}:{listening.getsockname()[1]}"
    err.print(f"Serving {name} at {address}/v1; {address}/metrics; stop with Ctrl-C.", soft_wrap=True)
    server.run([listening])


def bench(
    engine: EnginePath,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your prompts: JSON lines with prompt or messages, ShareGPT, an OpenAI batch file, or .txt with one a line. \\[default: eight built-in texts]",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take so many of them.", show_default=False)
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="1,4,8", help="Sequences at a time, one measurement for each.")
    ] = "1",
    block_width: Annotated[
        str | None,
        typer.Option(
            metavar="2,4,8", help="Verify so many rows of a block. \\[default: all]", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length.")] = False,
    temperature: Annotated[
        float, typer.Option(help="Above 0 samples, from an engine built with --sampling.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="With --temperature.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Runs of every setting, interleaved, after a warm-up.")] = 3,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Measure this OpenAI-compatible server on the same prompts.",
            show_default=False,
        ),
    ] = None,
    against_model: Annotated[
        str | None, typer.Option(help="Its model. \\[default: its first]", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="For that server.", show_default=False)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table there, too.", show_default=False)
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 lets the back end choose.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure an engine on your own prompts, against its plain decoding in the same run.

    Both modes stay loaded, so it takes the memory of two. Example: speccompile bench engines/mine --prompts traffic.jsonl --batch 1,8
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from speccompile.compiler.bench_tables import print_bench, write_bench_csv
    from speccompile.compiler.run import builtin_prompts
    from speccompile.runtime import Engine, SamplingParams
    from speccompile.runtime.bench import BenchOptions
    from speccompile.runtime.bench import bench as measure
    from speccompile.runtime.prompts import load_prompts

    loaded = Engine.load(engine, threads)
    given = builtin_prompts(loaded)[:limit] if prompts is None else load_prompts(prompts, loaded, limit)
    widths = (None,) if block_width is None else parse_numbers("--block-width", block_width)
    params = SamplingParams(
        max_new_tokens, temperature, top_p=top_p, seed=0 if temperature > 0 else None, ignore_eos=ignore_eos
    )
    batches = parse_numbers("--batch", batch)
    options = BenchOptions(batches, widths, params, repeats, against, against_model, api_key)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("load", total=None)
        report = measure(loaded, given, options, lambda what: progress.update(task, description=what))
    if csv is not None:
        write_bench_csv(csv, report)
    if as_json:
        print(json.dumps(report))
        return
    print_bench(out, report)


def export_triton(
    engine: EnginePath,
    to: Annotated[Path, typer.Option("--out", metavar="DIR", help="Model repository to write into.")],
    name: Annotated[
        str | None,
        typer.Option(help="The model's name. \\[default: the engine directory's]", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of that name.")] = False,
) -> None:
    """Write a Triton Inference Server model repository: the step, its caches as a sequence's state.

    Example: speccompile export-triton engines/mine --out repository
    """
    from speccompile.export.directory import open_engine
    from speccompile.export.triton import export_triton as write

    name = name or engine.resolve().name
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise UserError(
            f"--name {name!r} is no name for a directory; letters, digits, dots, dashes and underscores are."
        )
    with err.status("writing"):
        written = write(open_engine(engine), to, name, force)
    out.print(
        f"Model written to {written}; serve it with: tritonserver --model-repository {to}", soft_wrap=True
    )
