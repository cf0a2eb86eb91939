"""An OpenAI-compatible server over one engine: completions, chat, models, health and Prometheus metrics."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from speccompile.export.errors import UserError
from speccompile.runtime.background import Background, Full
from speccompile.runtime.generation import Engine
from speccompile.runtime.metrics import Metrics
from speccompile.runtime.openai_answers import ChatAnswer, CompletionAnswer, Piece
from speccompile.runtime.openai_schema import ChatRequest, Common, CompletionRequest
from speccompile.runtime.scheduler import Request as Sequence
from speccompile.runtime.tokenizer import chat_ids

POLL_S = 0.5
"""How often a waiting answer looks whether its client is still there."""


@dataclass(frozen=True)
class ServerOptions:
    model_name: str = "speccompile"
    api_key: str | None = None
    max_body_bytes: int = 4 * 2**20
    max_waiting: int = 256
    request_timeout_s: float = 600.0
    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None
    ):
        self.status, self.code = status, code
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code}}


def create_app(engine: Engine, options: ServerOptions, slots: int | None = None) -> FastAPI:
    """The application; the engine's session is made, and checked, before it is returned."""
    background = Background(engine.scheduler(slots), options.max_waiting)
    metrics = Metrics(background, engine.settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        yield
        await asyncio.to_thread(background.stop, options.drain_s)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.background = background
    app.add_middleware(_Guard, options=options)
    _handle_errors(app)
    created = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        if background.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": str(background.failure)}, 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": options.model_name, "object": "model", "created": created, "owned_by": "speccompile"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        body.check()
        answer = CompletionAnswer(options.model_name, engine)
        return await answer_to(http, body, body.prompts, body.max_tokens, answer)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        body.check()
        most = body.max_completion_tokens or body.max_tokens
        try:
            ids = await asyncio.to_thread(chat_ids, engine.tokenizer, body.conversation)
        except UserError:
            raise
        except Exception as error:  # a template's own raise_exception
            raise ApiError(400, f"The chat template refused the messages: {error}") from None
        answer = ChatAnswer(options.model_name, engine)
        return await answer_to(http, body, [ids], most, answer)

    async def answer_to(
        http: Request, body: Common, prompts: list, most: int | None, answer: CompletionAnswer
    ) -> Response:
        if body.model not in (None, options.model_name):
            raise ApiError(
                404,
                f"The model {body.model!r} does not exist; this server has {options.model_name!r}.",
                code="model_not_found",
            )
        sequences = await asyncio.to_thread(_sequences, engine, body, prompts, most)
        if len(sequences) > options.max_waiting:
            raise ApiError(
                400,
                f"{len(sequences)} completions were asked for at once; at most {options.max_waiting} can wait.",
            )
        work = _Work(background, metrics, sequences, body.n, options.request_timeout_s)
        work.submit()
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(work, answer, usage)
            return StreamingResponse(events, media_type="text/event-stream")
        await work.finish(http)
        return JSONResponse(answer.whole([s.result for s in work.sequences], work.usage))

    return app


def _sequences(engine: Engine, body: Common, prompts: list, most: int | None) -> list[Sequence]:
    """Every prompt `n` times, in the order of the choices."""
    sequences = []
    longest = engine.settings["max_seq_len"]
    for prompt in prompts:
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if len(ids) > longest:
            raise ApiError(
                400,
                f"The prompt has {len(ids)} tokens; this engine takes at most {longest}.",
                code="context_length_exceeded",
            )
        room = longest - len(ids) + 1
        for index in range(body.n):
            params = body.params(most, room, engine.settings["sampling"], index)
            sequences.append(engine.request(ids, params, text=True))
    if not sequences:
        raise ApiError(400, "There is no prompt.")
    return sequences


class _Work:
    """The sequences of one HTTP request, and the news of them."""

    def __init__(
        self,
        background: Background,
        metrics: Metrics,
        sequences: list[Sequence],
        choices: int,
        timeout_s: float,
    ):
        self.background, self.metrics, self.sequences = background, metrics, sequences
        self.choices = choices  # of each prompt
        self.loop, self.news = asyncio.get_running_loop(), asyncio.Queue()
        self.deadline = time.monotonic() + timeout_s
        self.left = len(sequences)

    def submit(self) -> None:
        for done, sequence in enumerate(self.sequences):
            try:
                self.background.submit(sequence, self._deliver(done))
            except Full:
                self.abort()
                self.metrics.rejected.inc()
                raise ApiError(
                    429, "Too many requests are waiting; try again later.", "rate_limit_error", "queue_full"
                ) from None

    def _deliver(self, index: int) -> Callable[[Sequence], None]:
        def deliver(sequence: Sequence) -> None:  # on the scheduler's thread
            self.metrics.observe(sequence)
            text, kept, count = sequence.text.take(), sequence.result.logprobs, len(sequence.new_tokens)
            new = None if kept is None else kept[len(kept) - count :]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self.loop.call_soon_threadsafe(
                    self.news.put_nowait, Piece(index, text, new, sequence.result.finish_reason)
                )

        return deliver

    async def pieces(self) -> AsyncIterator[Piece]:
        """What is new of each choice, until all have ended. Raises ApiError on a failure or at the deadline."""
        try:
            while self.left:
                try:
                    piece = await asyncio.wait_for(
                        self.news.get(), max(0.0, self.deadline - time.monotonic())
                    )
                except TimeoutError:
                    raise ApiError(
                        504, "The request took longer than this server allows.", "timeout_error", "timeout"
                    ) from None
                if piece.reason is not None:
                    self.left -= 1
                if piece.reason == "error":
                    raise ApiError(500, "The engine failed; the server's log says why.", "server_error")
                yield piece
        finally:
            if self.left:  # the client went away, or it took too long
                self.abort()

    async def finish(self, http: Request) -> None:
        async def watch() -> None:
            while not await http.is_disconnected():
                await asyncio.sleep(POLL_S)

        async def collect() -> None:
            async for _ in self.pieces():
                pass

        collecting, watching = asyncio.create_task(collect()), asyncio.create_task(watch())
        try:
            await asyncio.wait({collecting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                collecting.cancel()
                raise ApiError(499, "The client went away.", "cancelled")
            await collecting
        finally:
            watching.cancel()

    def abort(self) -> None:
        for sequence in self.sequences:
            self.background.abort(sequence)

    @property
    def usage(self) -> dict[str, Any]:
        results = [s.result for s in self.sequences]
        prompt = sum(len(r.prompt) for r in results[:: self.choices])
        completion = sum(len(r.token_ids) for r in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(r.reused_tokens for r in results)},
        }


async def _events(work: _Work, answer: CompletionAnswer, usage: bool) -> AsyncIterator[str]:
    """Server-sent events; an error on the way is one of them."""
    try:
        async for piece in work.pieces():
            yield _event(answer.piece(piece) | ({"usage": None} if usage else {}))
        if usage:
            yield _event(answer.frame([], streaming=True) | {"usage": work.usage})
    except ApiError as error:
        yield _event(error.body)
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        return JSONResponse(ApiError(400, str(error)).body, 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
        return JSONResponse(ApiError(400, f"{where}: {first['msg']}").body, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return JSONResponse(ApiError(error.status_code, str(error.detail)).body, error.status_code)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, "The server failed; its log says why.", "server_error").body, 500)


class _Guard:
    """Refuses a wrong API key and a body over the limit before anything is parsed; /health stays open."""

    def __init__(self, app: Any, options: ServerOptions):
        self.app, self.options = app, options

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key = self.options.api_key
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if key is not None and scope["path"] != "/health" and not hmac.compare_digest(given, key.encode()):
            error = ApiError(
                401, "The API key is missing or wrong.", "authentication_error", "invalid_api_key"
            )
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.options.max_body_bytes:
                error = ApiError(413, f"The body is over {self.options.max_body_bytes} bytes.")
                await JSONResponse(error.body, error.status)(scope, receive, send)
                return
            if not message.get("more_body") or message["type"] == "http.disconnect":
                break
        given_once = False

        async def replay() -> dict:
            nonlocal given_once
            if given_once:
                return await receive()
            given_once = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)
