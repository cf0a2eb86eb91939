"""Is the engine's greedy output the target's own? Token for token, against Transformers in eager mode.

Eager decoding follows the engine: at every position the target's arg-max after the engine's own tokens is
compared with the engine's next token. By induction a text without a difference is the target's greedy text; where
the two best logits are closer than the arithmetic can tell apart, the difference is reported as a near tie and the
comparison goes on from the engine's token.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from speccompile.compiler import checkpoint
from speccompile.export.errors import UserError
from speccompile.runtime import Engine, Generation

RELATIVE_TIE = {"float32": 1e-4, "float16": 1e-2}
"""Two logits nearer than this share of the largest one are a tie: a few hundred rounding errors of the type."""


@dataclass(frozen=True)
class Difference:
    """Position `position` of prompt `prompt`'s answer: the engine's token against the expected one, eager logits of both."""

    prompt: int
    position: int
    against: str
    engine_token: int
    expected_token: int
    engine_logit: float
    expected_logit: float
    near_tie: bool


@dataclass
class Verification:
    prompts: int = 0
    tokens: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def failures(self) -> list[Difference]:
        return [d for d in self.differences if not d.near_tie]

    def to_json(self) -> dict[str, Any]:
        steps = self.acceptance_lengths
        return {
            "identical": not self.differences,
            "passed": not self.failures,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "acceptance_length": sum(steps) / len(steps) if steps else None,
            "differences": [vars(d) for d in self.differences],
        }


def load_original_target(engine: Engine, location: str | None = None) -> PreTrainedModel:
    """The target the engine was built from (or the checkpoint at `location`), eager, in the engine's dtype."""
    settings = engine.directory.settings
    path = checkpoint.resolve(location or settings["target"]["path"])
    trust = settings["target"]["trust_remote_code"]
    return checkpoint.load_target(path, checkpoint.target_config(path, trust), settings["dtype"], trust)


@torch.no_grad()
def verify(
    engine: Engine,
    target: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    tie: float | None = None,
    on_prompt: Callable[[int], None] = lambda index: None,
) -> Verification:
    """Compare speculation with eager decoding of the target, and with the engine's own plain decoding."""
    settings = engine.directory.settings
    tie = RELATIVE_TIE[settings["dtype"]] if tie is None else tie
    outcome = Verification()
    speculated, plain = (
        [engine.generate([p], max_new_tokens, speculation)[0] for p in prompts]
        for speculation in (True, False)
    )
    for index, (prompt, fast, slow) in enumerate(zip(prompts, speculated, plain, strict=True)):
        logits = follow(target, prompt, fast.token_ids)
        outcome.prompts += 1
        outcome.tokens += len(fast.token_ids)
        outcome.acceptance_lengths += fast.acceptance_lengths
        expected = logits.argmax(-1).tolist()
        for position, (got, wanted) in enumerate(zip(fast.token_ids, expected, strict=True)):
            if got != wanted:
                outcome.differences.append(
                    _difference(index, position, "eager", got, wanted, logits[position], tie)
                )
        outcome.differences += _compare_plain(index, fast, slow, logits, tie)
        on_prompt(index)
    return outcome


def follow(target: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Eager logits [T, V] (float32) that precede each of `tokens`, decoded one row a step after `prompt`."""
    cache = DynamicCache(config=target.config)
    rows, feed = [], torch.tensor([prompt])
    for token in tokens:
        logits = target(input_ids=feed, cache=cache, use_cache=True, logits_to_keep=1).logits
        rows.append(logits[0, -1].float())
        feed = torch.tensor([[token]])
    return torch.stack(rows)


def _compare_plain(
    index: int, fast: Generation, slow: Generation, logits: torch.Tensor, tie: float
) -> list[Difference]:
    """The first position at which plain decoding left the speculated text, if any."""
    pairs = zip(slow.token_ids, fast.token_ids, strict=False)
    position = next((i for i, (s, f) in enumerate(pairs) if s != f), None)
    if position is None:
        return []
    got, wanted = fast.token_ids[position], slow.token_ids[position]
    return [_difference(index, position, "plain decoding", got, wanted, logits[position], tie)]


def _difference(
    prompt: int, position: int, against: str, got: int, wanted: int, row: torch.Tensor, tie: float
) -> Difference:
    engine_logit, expected_logit = row[got].item(), row[wanted].item()
    near = abs(expected_logit - engine_logit) <= tie * max(1.0, row.abs().max().item())
    return Difference(prompt, position, against, got, wanted, engine_logit, expected_logit, near)


def read_prompts(file: Path, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """One prompt a line: text, or a JSON object with `prompt` (text) or `prompt_ids` (token ids)."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as text ({error}).") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(encode(line))
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}, line {number}, starts like JSON but is not ({error}).") from None
        if isinstance(entry.get("prompt_ids"), list) and all(isinstance(i, int) for i in entry["prompt_ids"]):
            prompts.append(entry["prompt_ids"])
        elif isinstance(entry.get("prompt"), str):
            prompts.append(encode(entry["prompt"]))
        else:
            raise UserError(
                f"{file}, line {number}, has neither a text `prompt` nor a list of numbers `prompt_ids`."
            )
    if not prompts:
        raise UserError(f"{file} holds no prompt; one a line was expected.")
    return prompts
