"""`speccompile run`: one prompt or a conversation, with text in and out."""

import sys
from typing import Any

from rich.console import Console

from speccompile.runtime import Engine, Generation
from speccompile.runtime.tokenizer import chat_ids, load_tokenizer

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
        tokenizer = load_tokenizer(engine.directory)
        return [ids[:longest] for text in BUILTIN_PROMPTS if (ids := tokenizer.encode(text))]
    return [
        [(7 * i * i + 31 * n) % settings["vocab_size"] for i in range(min(4 + n, longest))] for n in range(8)
    ]


def generate_one(
    engine: Engine,
    prompt: str | None,
    prompt_ids: list[int] | None,
    chat: bool,
    max_new_tokens: int,
    speculation: bool,
    ignore_eos: bool,
    stream: bool,
) -> dict[str, Any]:
    """One answer as `run --json` prints it, plus a `summary` line for people."""
    tokenizer = load_tokenizer(engine.directory) if prompt is not None or has_tokenizer(engine) else None
    if prompt_ids is None:
        prompt_ids = (
            chat_ids(tokenizer, [{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        )
    result = _generate(engine, tokenizer, prompt_ids, max_new_tokens, speculation, ignore_eos, stream)
    seconds = result.prefill_s + result.decode_s
    return {
        "token_ids": result.token_ids,
        "text": tokenizer.decode(result.token_ids, skip_special_tokens=True) if tokenizer else None,
        "acceptance_lengths": result.acceptance_lengths,
        "finish_reason": result.finish_reason,
        "timings": {
            "prefill_s": result.prefill_s,
            "decode_s": result.decode_s,
            "tokens_per_s": len(result.token_ids) / seconds,
        },
        "summary": _summary(result, engine),
    }


def converse(engine: Engine, console: Console, **options: Any) -> None:
    """Read lines until end of file; each is answered with all earlier turns as context."""
    tokenizer = load_tokenizer(engine.directory)
    messages: list[dict[str, str]] = []
    options["stream"] = True
    while True:
        try:
            line = console.input("> ")
        except EOFError:
            return
        messages.append({"role": "user", "content": line})
        result = _generate(engine, tokenizer, chat_ids(tokenizer, messages), **options)
        messages.append(
            {"role": "assistant", "content": tokenizer.decode(result.token_ids, skip_special_tokens=True)}
        )


def _generate(
    engine: Engine,
    tokenizer: Any,
    prompt_ids: list[int],
    max_new_tokens: int,
    speculation: bool,
    ignore_eos: bool,
    stream: bool,
) -> Generation:
    printer = _Printer(tokenizer) if stream else None
    stop = [] if ignore_eos else engine.directory.settings["stop_token_ids"]
    result = engine.generate(
        [prompt_ids],
        max_new_tokens,
        stop,
        speculation,
        on_tokens=(lambda index, tokens: printer.add(tokens)) if printer else lambda index, tokens: None,
    )[0]
    if printer:
        printer.end()
    return result


class _Printer:
    """Prints text as tokens come, holding back a tail that is not yet a whole character."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.tokens, self.printed = tokenizer, [], 0

    def add(self, tokens: list[int], final: bool = False) -> None:
        self.tokens += tokens
        if self.tokenizer is None:
            text = "".join(f"{token}," for token in self.tokens)
        else:
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if final or not text.endswith("\ufffd"):
            sys.stdout.write(text[self.printed :])
            sys.stdout.flush()
            self.printed = len(text)

    def end(self) -> None:
        self.add([], final=True)
        sys.stdout.write("\n")


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
