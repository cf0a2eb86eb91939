"""What a request asks of a generation."""

import math
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from speccompile.export.errors import UserError

MOST_TOP_K = 256
MOST_LOGPROBS = 20


class TokenLogprob(NamedTuple):
    """Of an emitted token, under the target's softmax at temperature 1; `top` the likeliest tokens and theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. Names and defaults are vLLM's and Transformers', but for `temperature`: 0, which is greedy.

    `top_k` 0 is all tokens; `seed` None draws one. The stop tokens of the target's generation config end a sequence unless
    `ignore_eos`, as do `stop_token_ids` and the strings of `stop`. A stop token is kept, a stop string is cut from the text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Keep every token's log-probability, and this many of the likeliest alternatives; None keeps none."""

    def __post_init__(self):
        """Raises UserError for a number out of its range."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", 0 <= self.top_k <= MOST_TOP_K, f"from 0 (all tokens) to {MOST_TOP_K}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
                f"from 0 to {MOST_LOGPROBS}",
            ),
            ("stop", all(self.stop), "strings that are not empty"),
        )
        for name, holds, expected in checks:
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {expected}.")

    @property
    def samples(self) -> bool:
        return self.temperature > 0


@dataclass
class Uniforms:
    """A sequence's uniform numbers in [0, 1): the n-th generated token uses the n-th, whatever step brings it, so that the same
    seed gives the same text with and without speculation, alone and in a batch."""

    seed: int | None
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self):
        if self.seed is None:
            self.seed = secrets.randbits(63)
        self._generator = np.random.Generator(np.random.Philox(self.seed % 2**64))

    def window(self, start: int, count: int) -> np.ndarray:
        while len(self.numbers) < start + count:
            self.numbers = np.concatenate([self.numbers, self._generator.random(256, dtype=np.float32)])
        return self.numbers[start : start + count]
