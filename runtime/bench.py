"""Measures an engine on given prompts, speculation against plain decoding in one run, and any OpenAI-compatible server beside it.

As many requests as the batch has sequences are under way at any time; the next starts when one ends. Definitions, as vLLM's
benchmark has them: time to first token from a request's start; time per output token of a request = (end - first token) / (tokens - 1); output throughput over the wall time of all requests.
Acceptance length is tokens per decode step, the bonus token included; the last step of a request, which its budget may cut,
is left out. Acceptance at a position is the share of steps that accepted at least so many proposals.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from speccompile.export import memory
from speccompile.export.errors import UserError
from speccompile.runtime.generation import Engine
from speccompile.runtime.params import SamplingParams


@dataclass(frozen=True)
class Setting:
    """One thing to measure: `mode` "plain", "speculation" or "server", at so many sequences a time and rows a block."""

    mode: str
    batch: int
    block_width: int | None = None


@dataclass
class Run:
    """All prompts once under a setting; times in seconds."""

    seconds: float
    tokens: int
    first: list[float]
    per_token: list[float]
    acceptance_lengths: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class BenchOptions:
    batches: tuple[int, ...] = (1,)
    block_widths: tuple[int | None, ...] = (None,)
    params: SamplingParams = SamplingParams()
    repeats: int = 3
    against: str | None = None
    against_model: str | None = None
    api_key: str | None = None


def bench(
    engine: Engine,
    prompts: list[list[int]],
    options: BenchOptions,
    on_run: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Every setting `repeats` times, the settings of a batch size interleaved, after a warm-up. Raises UserError."""
    _check(engine, options)
    plain_engine = None
    if engine.settings["plain_file"] is not None:
        plain_engine = Engine(engine.directory, engine.threads)  # a session each: both modes stay loaded
    rows = []
    for batch in options.batches:
        settings = [Setting("plain", batch)] * (plain_engine is not None)
        settings += [Setting("speculation", batch, width) for width in options.block_widths]
        settings += [Setting("server", batch)] * (options.against is not None)
        runs: dict[Setting, list[Run]] = {setting: [] for setting in settings}
        for repeat in range(-1, options.repeats):  # the first is the warm-up
            for setting in settings:
                on_run(f"{setting.mode}, batch {batch}, {'warm-up' if repeat < 0 else f'run {repeat + 1}'}")
                chosen = prompts[: max(2 * batch, 2)] if repeat < 0 else prompts
                run = _run(plain_engine if setting.mode == "plain" else engine, setting, chosen, options)
                if repeat >= 0:
                    runs[setting].append(run)
        rows += [_row(setting, runs[setting], runs.get(Setting("plain", batch))) for setting in settings]
    settings = engine.settings
    weights = engine.directory.manifest["files"]
    return {
        "engine": str(engine.directory.path),
        "prompts": len(prompts),
        "prompt_tokens": {"median": statistics.median(map(len, prompts)), "max": max(map(len, prompts))},
        "max_new_tokens": options.params.max_new_tokens,
        "repeats": options.repeats,
        "memory": {
            "weights": sum(f["bytes"] for name, f in weights.items() if name.startswith("rank0")),
            "target_cache_per_sequence": memory.cache_bytes(settings, "target"),
            "draft_cache_per_sequence": memory.cache_bytes(settings, "draft"),
        },
        "rows": rows,
    }


def _check(engine: Engine, options: BenchOptions) -> None:
    most = engine.settings["max_batch_size"]
    for batch in options.batches:
        if not 1 <= batch <= most:
            raise UserError(
                f"--batch {batch} is not from 1 to the {most} sequences this engine was built for."
            )
    for width in options.block_widths:
        if width is not None and not 1 <= width <= engine.settings["block_width"]:
            raise UserError(
                f"--block-width {width} is not from 1 to the engine's {engine.settings['block_width']}."
            )
    if options.repeats < 1:
        raise UserError(f"--repeats is {options.repeats}; at least 1 is needed.")


def _run(engine: Engine, setting: Setting, prompts: list[list[int]], options: BenchOptions) -> Run:
    if setting.mode == "server":
        return asyncio.run(_run_server(setting.batch, prompts, options))
    scheduler = engine.scheduler(
        setting.batch, setting.mode == "speculation", block_width=setting.block_width
    )
    left, requests = list(reversed(prompts)), []
    start = time.perf_counter()
    while left or scheduler.busy:
        while left and len(scheduler.active) + len(scheduler.waiting) < setting.batch:
            requests.append(scheduler.add(engine.request(left.pop(), options.params)))
        scheduler.step()
    seconds = time.perf_counter() - start
    results = [r.result for r in requests]
    return Run(
        seconds,
        sum(len(r.token_ids) for r in results),
        [r.time_to_first_token for r in results],
        [
            (r.elapsed_s - r.time_to_first_token) / (len(r.token_ids) - 1)
            for r in results
            if len(r.token_ids) > 1
        ],
        [n for r in results for n in r.acceptance_lengths[:-1]],
        [r.token_ids for r in results],
    )


async def _run_server(batch: int, prompts: list[list[int]], options: BenchOptions) -> Run:
    """The same token ids, as streamed completions, `batch` of them at a time."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    slots, outcomes = asyncio.Semaphore(batch), []
    async with httpx.AsyncClient(base_url=options.against, timeout=600, headers=headers) as http:
        model = options.against_model or (await _get(http, "/v1/models"))["data"][0]["id"]

        async def ask(prompt: list[int]) -> None:
            params = options.params
            body = {
                "model": model, "prompt": prompt, "max_tokens": params.max_new_tokens, "temperature": params.temperature,
                "top_p": params.top_p, "seed": params.seed, "stream": True, "stream_options": {"include_usage": True},
            } | ({"ignore_eos": True} if params.ignore_eos else {})  # fmt: skip
            async with slots:
                outcomes.append(await _stream(http, body, options.against))

        start = time.perf_counter()
        try:
            await asyncio.gather(*(ask(prompt) for prompt in prompts))
        except httpx.HTTPError as error:
            raise UserError(f"{options.against} cannot be measured: {error!r}.") from None
        seconds = time.perf_counter() - start
    per_token = [(end - first) / (tokens - 1) for first, end, tokens in outcomes if tokens > 1]
    return Run(seconds, sum(t for *_, t in outcomes), [first for first, *_ in outcomes], per_token)


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], where: str) -> tuple[float, float, int]:
    """One streamed completion: seconds to its first token and to its end, and its tokens."""
    start = time.perf_counter()
    first, tokens = None, None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")[:300]
            raise UserError(f"{where} answered {answer.status_code}: {text}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if first is None and event.get("choices"):
                    first = time.perf_counter() - start
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if first is None or not tokens:
        raise UserError(f"{where} streamed no tokens, or no usage, which the measurement needs.")
    return first, time.perf_counter() - start, tokens


async def _get(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    try:
        answer = await http.get(path)
        return answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(
            f"{http.base_url}{path} did not answer as an OpenAI-compatible server does: {error!r}."
        ) from None


def _row(setting: Setting, runs: list[Run], plain: list[Run] | None) -> dict[str, Any]:
    """A setting's figures: medians over its runs, and the spread of what is compared."""
    first = [t for run in runs for t in run.first]
    per_token = [t for run in runs for t in run.per_token]
    throughput = sorted(run.throughput for run in runs)
    lengths = runs[0].acceptance_lengths if setting.mode == "speculation" else []
    row: dict[str, Any] = {
        "mode": setting.mode,
        "batch": setting.batch,
        "block_width": setting.block_width,
        "output_tokens_per_s": {
            "median": statistics.median(throughput),
            "min": throughput[0],
            "max": throughput[-1],
        },
        "time_to_first_token_s": _percentiles(first),
        "time_per_output_token_s": _percentiles(per_token),
        "output_tokens": runs[0].tokens,
        "acceptance_length": statistics.fmean(lengths) if lengths else None,
        "accepted_at_position": _positions(lengths),
    }
    if plain is not None and setting.mode != "plain":
        ratios = sorted(run.throughput / base.throughput for run, base in zip(runs, plain))
        row["speedup"] = {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]}
        if setting.mode == "speculation":
            row["texts_that_differ"] = sum(a != b for a, b in zip(runs[0].texts, plain[0].texts))
    return row


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
    }


def _positions(lengths: list[int]) -> list[float]:
    return [sum(n > i for n in lengths) / len(lengths) for i in range(1, max(lengths))] if lengths else []
