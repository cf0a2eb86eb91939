"""What the OpenAI API's completion requests may hold, and how each field becomes ours or is refused."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from speccompile.export.errors import UserError
from speccompile.runtime.params import MOST_LOGPROBS, MOST_TOP_K, SamplingParams


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Common(BaseModel):
    """Fields of both endpoints; `top_k`, `min_p` and `ignore_eos` are the usual extensions."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MOST_TOP_K)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int = Field(1, ge=1, le=64)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def refuse(self, **refused: bool) -> None:
        """Raises UserError for what would change the text and cannot be done: nothing is ignored silently."""
        refused |= {
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "repetition_penalty": self.repetition_penalty not in (None, 1.0),
            "logit_bias": bool(self.logit_bias),
        }
        for name, given in refused.items():
            if given:
                raise UserError(
                    f"{name} is not supported: tokens are chosen inside the engine's graph, which has no such input; leave it out."
                )

    def params(self, most: int | None, room: int, samples: bool, index: int) -> SamplingParams:
        """`most` new tokens, at most `room`; the `index`-th of `n` choices has a seed of its own. An engine that `samples` does so
        by default, at temperature 1, as the API has it."""
        temperature = self.temperature if self.temperature is not None else float(samples)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 16:
            raise UserError(f"stop holds {len(stop)} strings; at most 16 are looked for.")
        return SamplingParams(
            max_new_tokens=room if most is None else min(most, room),
            temperature=temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else (self.seed + index) % 2**64,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
            logprobs=self.alternatives,
        )


class CompletionRequest(Common):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        self.refuse(echo=self.echo, suffix=bool(self.suffix), best_of=self.best_of not in (None, self.n))

    @property
    def alternatives(self) -> int | None:
        """How many alternatives of each token to give; None: no log-probabilities at all."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UserError(
                    f"A message holds a part of type {part.get('type')!r}; only text is understood."
                )
        return "".join(part["text"] for part in self.content)


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def check(self) -> None:
        self.refuse(
            tools=bool(self.tools),
            tool_choice=self.tool_choice not in (None, "none"),
            response_format=self.response_format not in (None, {"type": "text"}),
        )

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> list[dict[str, str]]:
        return [{"role": m.role, "content": m.text} for m in self.messages]
