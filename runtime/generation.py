"""The generation loop: prompts in, tokens out, one step for the whole batch at a time.

Every sequence is at its own place: one may still be feeding its prompt in chunks while another decodes, in the
same step. A sequence ends at a stop token, at its budget, or when its cache is full.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from speccompile.export.directory import EngineDirectory, open_engine
from speccompile.export.errors import UserError
from speccompile.runtime.self_check import self_check
from speccompile.runtime.session import OnnxSession, StepOutput

PREFILL_CHUNK = 512


@dataclass
class Generation:
    """What one prompt produced.

    `acceptance_lengths` holds, for every decode step, the tokens it emitted (bonus token included) as far as they
    were used. `finish_reason` is "stop" (a stop token, which is kept), "length" (the budget) or "capacity" (the cache
    is full). Times are in seconds.
    """

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
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


@dataclass
class _Sequence:
    """A sequence's place in its prompt and cache; `block` is the next tokens to verify once the prompt is fed."""

    result: Generation
    budget: int
    fed: int = 0
    length: int = 0
    block: np.ndarray | None = None
    confidence: list[float] | None = None

    @property
    def live(self) -> bool:
        return self.result.finish_reason is None

    @property
    def prefilling(self) -> bool:
        return self.fed < len(self.result.prompt)


class Engine:
    """A loaded engine directory. Sessions are made on first use, one per batch size and mode, checked against the steps that
    the build recorded, and kept."""

    def __init__(self, directory: EngineDirectory, threads: int = 0):
        self.directory = directory
        self.threads = threads
        self._sessions: dict[tuple[int, bool], OnnxSession] = {}

    @classmethod
    def load(cls, path: str | Path, threads: int = 0) -> "Engine":
        """Open an engine directory, verifying its manifest. `threads` 0 lets ONNX Runtime choose."""
        return cls(open_engine(Path(path)), threads)

    def session(self, batch: int, plain: bool = False) -> OnnxSession:
        settings = self.directory.settings
        if plain and settings["plain_file"] is None:
            raise UserError(
                f"{self.directory.path} holds no plain step (its back end is {settings['backend']}); decode with speculation."
            )
        key = batch, plain
        if key not in self._sessions:
            self._sessions.clear()  # one set of weights in memory at a time
            session = _session_class(settings["backend"])(self.directory, batch, plain, self.threads)
            self_check(session, self.directory)
            self._sessions[key] = session
        return self._sessions[key]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        stop_token_ids: Sequence[int] = (),
        speculation: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
        on_tokens: Callable[[int, list[int]], None] = lambda index, tokens: None,
    ) -> list[Generation]:
        """Greedy tokens for every prompt, as one batch.

        Args:
            prompts: token ids, each prompt at least one and at most `max_seq_len` of them.
            speculation: False decodes one row a step with the target alone.
            prefill_chunk: most prompt tokens of a sequence in one step.
            on_tokens: called with a prompt's index and its new tokens as they come.
        """
        settings = self.directory.settings
        for index, prompt in enumerate(prompts):
            _check_prompt(index, prompt, settings)
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; at least 1 was expected.")
        session = self.session(len(prompts), plain=not speculation)
        prefill_chunk = min(prefill_chunk, settings.get("prefill_chunk", prefill_chunk))
        sequences = [_Sequence(Generation(list(map(int, prompt))), max_new_tokens) for prompt in prompts]
        stop = frozenset(stop_token_ids)
        while any(sequence.live for sequence in sequences):
            _advance(session, sequences, stop, max(prefill_chunk, 1), on_tokens)
        return [sequence.result for sequence in sequences]


def _session_class(backend: str) -> type:
    """Imported when asked for: each needs a library that the others do without."""
    if backend == "torch":
        from speccompile.runtime.torch_session import TorchSession

        return TorchSession
    if backend in ("tensorrt-rtx", "tensorrt"):
        from speccompile.runtime.tensorrt_session import TensorrtSession

        return TensorrtSession
    return OnnxSession


def _check_prompt(index: int, prompt: Sequence[int], settings: dict) -> None:
    if not 1 <= len(prompt) <= settings["max_seq_len"]:
        raise UserError(
            f"Prompt {index} has {len(prompt)} tokens; this engine takes from 1 to {settings['max_seq_len']} (its --max-seq-len)."
        )
    for token in prompt:
        if not 0 <= token < settings["vocab_size"]:
            raise UserError(
                f"Prompt {index} holds the token {token}, which is outside the vocabulary of {settings['vocab_size']}."
            )


def _advance(
    session: OnnxSession,
    sequences: list[_Sequence],
    stop: frozenset[int],
    chunk: int,
    on_tokens: Callable[[int, list[int]], None],
) -> None:
    """One step for the batch: the next chunk of every unfinished prompt, the next block of every other sequence."""
    start = time.perf_counter()
    room = min(session.row_limit - sequence.length for sequence in sequences)
    feeds = [_next_tokens(sequence, min(chunk, room)) for sequence in sequences]
    rows = max(len(feed) for feed, _ in feeds)
    tokens = np.zeros((len(sequences), rows), np.int64)
    for row, (feed, _) in zip(tokens, feeds, strict=True):
        row[: len(feed)] = feed
    num_tokens = np.array([len(feed) for feed, _ in feeds])
    num_known = np.array([known for _, known in feeds])
    lengths = np.array([sequence.length for sequence in sequences])
    output = session.step(tokens, num_tokens, num_known, lengths, _next_given(sequences, num_known))
    seconds = time.perf_counter() - start
    for index, sequence in enumerate(sequences):
        if not sequence.live:
            continue
        was_prefilling = sequence.prefilling
        sequence.length = int(output.new_lengths[index])
        if was_prefilling:
            sequence.result.prefill_s += seconds
            sequence.fed += int(num_known[index])
            if sequence.prefilling:
                continue
        else:
            sequence.result.decode_s += seconds
            sequence.result.proposals.append(feeds[index][0][1:].tolist())
            if sequence.confidence is not None:
                sequence.result.confidences.append(sequence.confidence)
        emitted = output.emitted[index, : output.num_emitted[index]].tolist()
        used = _emit(sequence, emitted, stop, session.max_seq_len)
        if not was_prefilling:
            sequence.result.acceptance_lengths.append(len(used))
        _take_block(sequence, output, index)
        if not sequence.live:
            sequence.length = 0  # its rows of the next steps are padding, written over its own dead cache
        on_tokens(index, used)


def _next_given(sequences: list[_Sequence], num_known: np.ndarray) -> np.ndarray:
    """[B] the prompt token after this step's chunk; -1 where the prompt ends with it, or has ended."""
    ends = [s.fed + int(known) if s.live and s.prefilling else -1 for s, known in zip(sequences, num_known)]
    return np.array(
        [s.result.prompt[end] if 0 <= end < len(s.result.prompt) else -1 for s, end in zip(sequences, ends)]
    )


def _take_block(sequence: _Sequence, output: StepOutput, index: int) -> None:
    """Keep what the sequence verifies next: anchor and proposals, as far as the draft's confidence reaches."""
    if output.block is None:
        sequence.block = output.emitted[index, :1]
        return
    rows = output.block.shape[1] if output.num_proposed is None else 1 + int(output.num_proposed[index])
    sequence.block = output.block[index, :rows]
    if output.confidence is not None:
        sequence.confidence = output.confidence[index].tolist()


def _next_tokens(sequence: _Sequence, limit: int) -> tuple[np.ndarray, int]:
    """The tokens a sequence brings to the next step, and how many of them are given."""
    if not sequence.live:
        return np.empty(0, np.int64), 0
    if sequence.prefilling:
        feed = np.array(sequence.result.prompt[sequence.fed : sequence.fed + limit])
        return feed, len(feed)
    return sequence.block, 1


def _emit(sequence: _Sequence, emitted: list[int], stop: frozenset[int], max_seq_len: int) -> list[int]:
    """Append emitted tokens up to and including the first that ends the sequence; return those appended."""
    result = sequence.result
    used = []
    for token in emitted:
        result.token_ids.append(token)
        used.append(token)
        if token in stop:
            result.finish_reason = "stop"
        elif len(result.token_ids) == sequence.budget:
            result.finish_reason = "length"
        elif len(result.prompt) + len(result.token_ids) > max_seq_len:
            result.finish_reason = "capacity"
        if result.finish_reason:
            break
    return used
