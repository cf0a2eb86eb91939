"""The Python API: an engine directory, prompts in, tokens out."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from speccompile.export.directory import EngineDirectory, open_engine
from speccompile.export.errors import UserError
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.scheduler import Generation, Request, Scheduler
from speccompile.runtime.self_check import self_check
from speccompile.runtime.session import OnnxSession
from speccompile.runtime.text import TextStream
from speccompile.runtime.tokenizer import load_tokenizer

PREFILL_CHUNK = 512
GREEDY = SamplingParams()
Prompt = Sequence[int] | str


class Engine:
    """A loaded engine directory. The session of the last batch size and mode is kept; each new one is first checked against
    the steps that the build recorded."""

    def __init__(self, directory: EngineDirectory, threads: int = 0):
        self.directory = directory
        self.threads = threads
        self._session: tuple[tuple[int, bool], Any] | None = None
        self._tokenizer: Any = None

    @classmethod
    def load(cls, path: str | Path, threads: int = 0) -> "Engine":
        """Open an engine directory, verifying its manifest. `threads` 0 lets the back end choose."""
        return cls(open_engine(Path(path)), threads)

    @property
    def settings(self) -> dict[str, Any]:
        return self.directory.settings

    @property
    def tokenizer(self) -> Any:
        """The target's, as a Transformers tokenizer. Raises UserError where the engine has none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.directory)
        return self._tokenizer

    def session(self, batch: int, plain: bool = False) -> Any:
        """The step for `batch` sequences; `plain` decodes one row a step with the target alone."""
        if plain and self.settings["plain_file"] is None:
            raise UserError(
                f"{self.directory.path} holds no plain step (its back end is {self.settings['backend']}); decode with speculation."
            )
        key = batch, plain
        if self._session is None or self._session[0] != key:
            self._session = None  # one set of weights in memory at a time
            session = _session_class(self.settings["backend"])(self.directory, batch, plain, self.threads)
            self_check(session, self.directory)
            self._session = key, session
        return self._session[1]

    def request(self, prompt: Prompt, params: SamplingParams = GREEDY, text: bool = False) -> Request:
        """A checked request for a `Scheduler`. `text`: follow its text too, not its tokens alone. Raises UserError."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(map(int, prompt))
        _check_prompt(ids, self.settings)
        if params.samples and not self.settings["sampling"]:
            raise UserError(
                f"temperature is {params.temperature}, and {self.directory.path} decodes greedily only; build it again with --sampling."
            )
        if params.logprobs is not None and not self.settings["sampling"]:
            raise UserError(
                f"logprobs were asked for, and {self.directory.path} does not compute them; build it again with --sampling."
            )
        follows = TextStream(self.tokenizer, params.stop) if text or params.stop else None
        own = () if params.ignore_eos else self.settings["stop_token_ids"]
        return Request(ids, params, frozenset([*own, *params.stop_token_ids]), follows)

    def scheduler(self, slots: int | None = None, speculation: bool = True, **options: Any) -> Scheduler:
        """Continuous batching over `slots` sequences (None: as many as the engine was built for)."""
        options.setdefault("prefill_chunk", PREFILL_CHUNK)
        if "prefill_chunk" in self.settings:
            options["prefill_chunk"] = min(options["prefill_chunk"], self.settings["prefill_chunk"])
        return Scheduler(
            self.session(slots or self.settings["max_batch_size"], plain=not speculation), **options
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | int = GREEDY,
        speculation: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
        block_width: int | None = None,
        on_tokens: Callable[[int, list[int]], None] = lambda index, tokens: None,
    ) -> list[Generation]:
        """Continue every prompt, up to `max_batch_size` of them at a time.

        Args:
            prompts: texts, or token ids, at least one and at most `max_seq_len` of them.
            params: for all, or one for each; a number is `SamplingParams(max_new_tokens=…)`.
            speculation: False decodes one row a step with the target alone.
            prefill_chunk: most prompt tokens of a sequence in one step.
            block_width: verify only so many rows of a block, the anchor included (large batches have less to spare).
            on_tokens: called with a prompt's index and its new tokens as they come.
        """
        if isinstance(params, int):
            params = SamplingParams(max_new_tokens=params)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts were given with {len(each)} params; give one, or one for each."
            )
        requests = [self.request(prompt, p) for prompt, p in zip(prompts, each)]
        if not requests:
            return []
        slots = min(len(requests), self.settings["max_batch_size"])
        scheduler = self.scheduler(slots, speculation, prefill_chunk=prefill_chunk, block_width=block_width)
        index = {id(scheduler.add(request)): i for i, request in enumerate(requests)}
        while scheduler.busy:
            for request in scheduler.step():
                on_tokens(index[id(request)], request.new_tokens)
        return [request.result for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        speculation: bool = True,
    ) -> Iterator[str]:
        """The text that continues one prompt, piece by piece. What stops early stops the generation."""
        request = self.request(prompt, params, text=True)
        scheduler = self.scheduler(1, speculation)
        scheduler.add(request)
        try:
            while scheduler.busy:
                for moved in scheduler.step():
                    if piece := moved.text.take():
                        yield piece
        finally:
            scheduler.abort(request)


def _session_class(backend: str) -> type:
    """Imported when asked for: each needs a library that the others do without."""
    if backend == "torch":
        from speccompile.runtime.torch_session import TorchSession

        return TorchSession
    if backend in ("tensorrt-rtx", "tensorrt"):
        from speccompile.runtime.tensorrt_session import TensorrtSession

        return TensorrtSession
    return OnnxSession


def _check_prompt(prompt: Sequence[int], settings: dict) -> None:
    if not 1 <= len(prompt) <= settings["max_seq_len"]:
        raise UserError(
            f"A prompt has {len(prompt)} tokens; this engine takes from 1 to {settings['max_seq_len']} (its --max-seq-len)."
        )
    for token in prompt:
        if not 0 <= token < settings["vocab_size"]:
            raise UserError(
                f"A prompt holds the token {token}, which is outside the vocabulary of {settings['vocab_size']}."
            )
