"""`speccompile run`: one prompt or a conversation, with text in and out."""

import sys
from typing import Any

from rich.console import Console

from speccompile.runtime import Engine, Generation, SamplingParams
from speccompile.runtime.tokenizer import chat_ids

BUILTIN_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The statement is used to",
    "1, 2, 3, 4, 5,",
    "Question: Why is the sky blue?\nAnswer:",
    "An object is",
    "import os\nimport sys\n",
)


def has_tokenizer(engine: Engine) -> bool:
    return (engine.directory.path / "tokenizer.json").exists() or (
        engine.directory.path / "tokenizer_config.json"
    ).exists()


def builtin_prompts(engine: Engine) -> list[list[int]]:
    """Token ids of a few texts; of pseudo-random tokens where the engine has no tokenizer."""
    settings = engine.directory.settings
    longest = max(1, settings["max_seq_len"] // 2)
    if has_tokenizer(engine):
        return [ids[:longest] for text in BUILTIN_PROMPTS if (ids := engine.tokenizer.encode(text))]
    return [
        [(7 * i * i + 31 * n) % settings["vocab_size"] for i in range(min(4 + n, longest))] for n in range(8)
    ]


def generate_one(
    engine: Engine,
    prompt: str | None,
    prompt_ids: list[int] | None,
    chat: bool,
    params: SamplingParams,
    speculation: bool,
    stream: bool,
) -> dict[str, Any]:
    """One answer as `run --json` prints it, plus a `summary` line for people."""
    tokenizer = engine.tokenizer if prompt is not None or has_tokenizer(engine) else None
    if prompt_ids is None:
        prompt_ids = (
            chat_ids(tokenizer, [{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        )
    result = _generate(engine, prompt_ids, params, speculation, stream)
    seconds = result.prefill_s + result.decode_s
    return {
        "token_ids": result.token_ids,
        "text": result.text,
        "acceptance_lengths": result.acceptance_lengths,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "timings": {
            "prefill_s": result.prefill_s,
            "decode_s": result.decode_s,
            "tokens_per_s": len(result.token_ids) / seconds,
        },
        "summary": _summary(result, engine),
    }


def converse(engine: Engine, console: Console, params: SamplingParams, speculation: bool) -> None:
    """Read lines until end of file; each is answered with all earlier turns as context."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = console.input("> ")
        except EOFError:
            return
        messages.append({"role": "user", "content": line})
        result = _generate(engine, chat_ids(engine.tokenizer, messages), params, speculation, stream=True)
        messages.append({"role": "assistant", "content": result.text})


def _generate(
    engine: Engine, prompt_ids: list[int], params: SamplingParams, speculation: bool, stream: bool
) -> Generation:
    request = engine.request(prompt_ids, params, text=has_tokenizer(engine))
    scheduler = engine.scheduler(1, speculation)
    scheduler.add(request)
    while scheduler.busy:
        for moved in scheduler.step():
            if stream:
                text = "".join(f"{t}," for t in moved.new_tokens) if moved.text is None else moved.text.take()
                sys.stdout.write(text)
                sys.stdout.flush()
    if stream:
        sys.stdout.write("\n")
    return request.result


def _summary(result: Generation, engine: Engine) -> str:
    seconds = result.prefill_s + result.decode_s
    parts = [
        f"{len(result.token_ids)} tokens in {seconds:.2f} s ({len(result.token_ids) / seconds:.1f} tokens/s)"
    ]
    if result.acceptance_length is not None:
        parts.append(
            f"acceptance length {result.acceptance_length:.2f} over {len(result.acceptance_lengths)} steps"
        )
    parts.append(f"prefill {result.prefill_s:.2f} s")
    if result.finish_reason == "capacity":
        parts.append(
            f"ended: the cache is full at {engine.directory.settings['max_seq_len']} tokens (--max-seq-len of the build)"
        )
    elif result.finish_reason == "length":
        parts.append("ended: --max-new-tokens reached")
    return "; ".join(parts)
