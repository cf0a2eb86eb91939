"""How the OpenAI API words what an engine generated: whole answers, and pieces of streamed ones."""

import time
import uuid
from typing import Any, NamedTuple

from speccompile.runtime.generation import Engine
from speccompile.runtime.params import TokenLogprob
from speccompile.runtime.scheduler import Generation


class Piece(NamedTuple):
    """What a step brought for one choice."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None
    reason: str | None


class CompletionAnswer:
    """One answer of `/v1/completions`; an object for each HTTP request, since it remembers what it has streamed."""

    prefix, whole_kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, engine: Engine):
        self.model, self.tokenizer = model, engine.tokenizer
        self.identity, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.offsets: dict[int, int] = {}

    def frame(self, choices: list[dict[str, Any]], streaming: bool) -> dict[str, Any]:
        kind = self.piece_kind if streaming else self.whole_kind
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self, results: list[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            self._choice(i, r.finish_reason, r.logprobs) | self.whole_content(r.text)
            for i, r in enumerate(results)
        ]
        return self.frame(choices, streaming=False) | {"usage": usage}

    def piece(self, piece: Piece) -> dict[str, Any]:
        choice = self._choice(piece.index, piece.reason, piece.logprobs) | self.piece_content(piece)
        return self.frame([choice], streaming=True)

    def _choice(self, index: int, reason: str | None, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        reason = "length" if reason == "capacity" else reason  # a full cache is a length to the API's clients
        described = None if logprobs is None else self.describe(index, logprobs)
        return {"index": index, "logprobs": described, "finish_reason": reason}

    def whole_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece_content(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def describe(self, index: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        tokens, offsets = [self.token(entry.token) for entry in logprobs], []
        for token in tokens:
            offsets.append(self.offsets.setdefault(index, 0))
            self.offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{self.token(t): value for t, value in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }

    def token(self, token: int) -> str:
        return self.tokenizer.decode([token])


class ChatAnswer(CompletionAnswer):
    """One answer of `/v1/chat/completions`."""

    prefix, whole_kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, engine: Engine):
        super().__init__(model, engine)
        self.started: set[int] = set()

    def whole_content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def piece_content(self, piece: Piece) -> dict[str, Any]:
        first = {} if piece.index in self.started else {"role": "assistant"}
        self.started.add(piece.index)
        return {"delta": first | {"content": piece.text}}

    def describe(self, index: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(e.token, e.logprob)
                | {"top_logprobs": [self._entry(t, value) for t, value in e.top]}
                for e in logprobs
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
