"""Continuous batching: requests enter and leave a fixed number of slots at every step.

Every slot is at its own place: one may still be feeding its prompt in chunks while another decodes, in the same step. A
step's rows are the longest slot's, so while any slot decodes, prompts are fed in chunks of `max_step_tokens` shared among
the slots: a long prompt delays the others by little. A free slot keeps its cache until another request takes it, which
then does not feed again what its prompt has in common with it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speccompile.runtime.params import SamplingParams, TokenLogprob, Uniforms
from speccompile.runtime.session import Sampling, StepOutput
from speccompile.runtime.text import TextStream

WORTH_COPYING = 32
"""Least number of rows in common with another slot's cache to copy them."""


@dataclass
class Generation:
    """What one prompt produced.

    `acceptance_lengths` holds, for every decode step, the tokens it emitted (bonus token included) as far as they
    were used. `finish_reason` is "stop" (a stop token, which is kept, or a stop string, which is cut from the text), "length"
    (the budget), "capacity" (the cache is full) or "abort". Times are in seconds.
    """

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    time_to_first_token: float | None = None
    """From the request's arrival, its wait for a slot included."""
    elapsed_s: float | None = None
    """From its arrival to its end."""
    reused_tokens: int = 0
    """Prompt tokens that another request had left in a cache."""
    seed: int | None = None
    """What its uniform numbers came from, where it was sampled."""
    text: str | None = None
    """Where the request had stop strings or its text was asked for."""
    logprobs: list[TokenLogprob] | None = None
    """Of every emitted token, where the request asked for it."""
    proposals: list[list[int]] = field(default_factory=list)
    """Every decode step's proposals (K-1, fewer where the draft's confidence cut them), for `verify` and the tests."""
    confidences: list[list[float]] = field(default_factory=list)
    """Likewise the draft's confidences in all K-1 of them, where it predicts any."""

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per decode step, bonus included; None before the first."""
        return (
            sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else None
        )


class Request:
    """A prompt on its way: waiting, then in a slot; `block` is the next tokens to verify once the prompt is fed."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, stop: frozenset[int], text: TextStream | None
    ):
        self.result = Generation(prompt)
        self.params, self.stop, self.text = params, stop, text
        self.uniforms = Uniforms(params.seed) if params.samples else None
        self.result.seed = self.uniforms.seed if self.uniforms else None
        self.result.logprobs = None if params.logprobs is None else []
        self.arrived = time.perf_counter()
        self.fed = self.length = 0
        self.block: np.ndarray | None = None
        self.confidence: list[float] | None = None
        self.new_tokens: list[int] = []
        """What the last step gave, for streaming."""

    @property
    def live(self) -> bool:
        return self.result.finish_reason is None

    @property
    def prefilling(self) -> bool:
        return self.fed < len(self.result.prompt)

    @property
    def committed(self) -> list[int]:
        """Tokens whose rows are in the cache."""
        return (self.result.prompt + self.result.token_ids)[: self.length]

    def next_tokens(self, limit: int, width: int) -> tuple[np.ndarray, int]:
        """The tokens it brings to the next step, and how many of them are given."""
        if self.prefilling:
            feed = np.array(self.result.prompt[self.fed : self.fed + limit])
            return feed, len(feed)
        return self.block[:width], 1

    def emit(self, emitted: list[int], max_seq_len: int) -> list[int]:
        """Take emitted tokens up to and including the first that ends the sequence; return those taken."""
        result, taken = self.result, []
        for token in emitted:
            result.token_ids.append(token)
            taken.append(token)
            stopped = self.text is not None and self.text.add(token)
            if token in self.stop or stopped:
                result.finish_reason = "stop"
            elif len(result.token_ids) == self.params.max_new_tokens:
                result.finish_reason = "length"
            elif len(result.prompt) + len(result.token_ids) > max_seq_len:
                result.finish_reason = "capacity"
            if result.finish_reason:
                break
        return taken

    def take_block(self, output: StepOutput, index: int) -> None:
        """Keep what it verifies next: anchor and proposals, as far as the draft's confidence reaches."""
        if output.block is None:
            self.block = output.emitted[index, :1]
            return
        rows = output.block.shape[1] if output.num_proposed is None else 1 + int(output.num_proposed[index])
        self.block = output.block[index, :rows]
        if output.confidence is not None:
            self.confidence = output.confidence[index].tolist()


class Scheduler:
    """Runs requests on a session.

    Args:
        session: its batch is the number of slots.
        prefill_chunk: most prompt tokens of a request in one step.
        max_step_tokens: rows times slots of a step in which some slot decodes; a decode block is never cut.
        block_width: verify so many rows of a block, the anchor included; None: all.
    """

    def __init__(
        self,
        session: Any,
        prefill_chunk: int = 512,
        max_step_tokens: int = 512,
        block_width: int | None = None,
    ):
        self.session, self.prefill_chunk = session, max(prefill_chunk, 1)
        self.width = min(block_width or session.width, session.width)
        self.mixed_chunk = max(self.width, max_step_tokens // session.batch)
        self.slots: list[Request | None] = [None] * session.batch
        self.cached: list[list[int]] = [[] for _ in range(session.batch)]
        """Tokens whose rows a free slot still holds."""
        self.waiting: deque[Request] = deque()

    @property
    def active(self) -> list[Request]:
        return [request for request in self.slots if request is not None]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, request: Request) -> Request:
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Drop a request, waiting or running; its slot is free for the next step."""
        if not request.live:
            return
        request.result.finish_reason = "abort"
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.slots:
            self._release(self.slots.index(request))

    def step(self) -> list[Request]:
        """Admit what fits, run one step, and return the requests that got tokens by it; the finished ones have left."""
        self._admit()
        if not self.active:
            return []
        start = time.perf_counter()
        session = self.session
        decoding = any(not r.prefilling for r in self.active)
        limit = min(self.prefill_chunk, self.mixed_chunk) if decoding else self.prefill_chunk
        limit = min([limit, *(session.row_limit - r.length for r in self.active)])
        feeds = [
            (np.empty(0, np.int64), 0) if r is None else r.next_tokens(limit, self.width) for r in self.slots
        ]
        rows = max(len(feed) for feed, _ in feeds)
        for cached in self.cached:  # a free slot's rows of this step are written behind what it keeps
            del cached[max(0, session.row_limit - rows) :]
        tokens = np.zeros((session.batch, rows), np.int64)
        for row, (feed, _) in zip(tokens, feeds, strict=True):
            row[: len(feed)] = feed
        num_known = np.array([known for _, known in feeds])
        lengths = [len(c) if r is None else r.length for r, c in zip(self.slots, self.cached, strict=True)]
        output = session.step(
            tokens, np.array([len(feed) for feed, _ in feeds]), num_known, np.array(lengths),
            self._given_next(num_known), self._sampling(),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        moved = [
            request
            for index, request in enumerate(self.slots)
            if request is not None and self._advance(request, index, feeds[index], output, seconds)
        ]
        for index, request in enumerate(self.slots):
            if request is not None and not request.live:
                self._release(index)
        return moved

    def _advance(
        self, request: Request, index: int, feed: tuple[np.ndarray, int], output: StepOutput, seconds: float
    ) -> bool:
        """What the step did for one request; True if it has new tokens."""
        result = request.result
        was_prefilling = request.prefilling
        request.length = int(output.new_lengths[index])
        if was_prefilling:
            result.prefill_s += seconds
            request.fed += feed[1]
            if request.prefilling:
                return False
            result.time_to_first_token = time.perf_counter() - request.arrived
        else:
            result.decode_s += seconds
            result.proposals.append(feed[0][1:].tolist())
            if request.confidence is not None:
                result.confidences.append(request.confidence)
        emitted = output.emitted[index, : output.num_emitted[index]].tolist()
        request.new_tokens = request.emit(emitted, self.session.max_seq_len)
        if result.logprobs is not None:
            result.logprobs += _logprobs(request.new_tokens, request.params.logprobs, output, index)
        if not was_prefilling:
            result.acceptance_lengths.append(len(request.new_tokens))
        request.take_block(output, index)
        if not request.live:
            result.elapsed_s = time.perf_counter() - request.arrived
        if not request.live and request.text is not None:
            request.text.finish()
            result.text = request.text.text
        return True

    def _given_next(self, num_known: np.ndarray) -> np.ndarray:
        """[B] the prompt token after this step's chunk; -1 where the prompt ends with it, or has ended."""
        given = np.full(len(self.slots), -1)
        for index, request in enumerate(self.slots):
            if request is not None and request.prefilling:
                end = request.fed + int(num_known[index])
                if end < len(request.result.prompt):
                    given[index] = request.result.prompt[end]
        return given

    def _sampling(self) -> Sampling | None:
        if not any(r.params.samples for r in self.active):
            return None
        numbers = Sampling.greedy(self.session.batch, self.session.width)
        for index, request in enumerate(self.slots):
            if request is not None and request.params.samples:
                for name in ("temperature", "top_k", "top_p", "min_p"):
                    getattr(numbers, name)[index] = getattr(request.params, name)
                produced = len(request.result.token_ids)
                numbers.uniforms[index] = request.uniforms.window(produced, self.session.width)
        return numbers

    def _admit(self) -> None:
        while self.waiting and None in self.slots:
            request = self.waiting.popleft()
            prompt = request.result.prompt
            free = [i for i, r in enumerate(self.slots) if r is None]
            # The last token in common is fed again: a chain's row of it depends on the token after.
            shared = [
                max(0, min(_common(c if r is None else r.committed, prompt), len(prompt)) - 1)
                for r, c in zip(self.slots, self.cached, strict=True)
            ]
            slot = max(free, key=lambda i: (shared[i], -len(self.cached[i])))
            best = int(np.argmax(shared))
            if shared[best] >= shared[slot] + WORTH_COPYING:
                self.session.copy_rows(best, slot, shared[best])
                shared[slot] = shared[best]
            request.fed = request.length = request.result.reused_tokens = shared[slot]
            self.cached[slot] = []
            self.slots[slot] = request

    def _release(self, index: int) -> None:
        self.cached[index] = self.slots[index].committed
        self.slots[index] = None


def _logprobs(tokens: list[int], most: int, output: StepOutput, index: int) -> list[TokenLogprob]:
    rows = zip(tokens, output.logprobs[index], output.top_tokens[index], output.top_logprobs[index])
    return [
        TokenLogprob(token, float(own), list(zip(top[:most].tolist(), theirs[:most].tolist())))
        for token, own, top, theirs in rows
    ]


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)
