"""The Python API for `asyncio` programs: many requests at a time, batched as they come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from speccompile.runtime.background import Background
from speccompile.runtime.generation import GREEDY, Engine, Prompt
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.scheduler import Generation, Request


class AsyncEngine:
    """An engine on a thread of its own, with `slots` sequences at a time. `close` it, or use it in a `with`.

    `stream` and `generate` raise `background.Full` when `max_waiting` requests wait, and RuntimeError when a step failed. A
    task that is cancelled frees its slot.
    """

    def __init__(self, engine: Engine, slots: int | None = None, max_waiting: int = 1024):
        self.engine = engine
        self._background = Background(engine.scheduler(slots), max_waiting)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Finish what runs, aborting what is left after `timeout` seconds."""
        self._background.stop(timeout)

    async def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> AsyncIterator[str]:
        """The text that continues a prompt, piece by piece."""
        request = self.engine.request(prompt, params, text=True)
        async for _ in self._news(request):
            if piece := request.text.take():
                yield piece

    async def generate(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Generation:
        """As `Engine.generate`, for one prompt."""
        request = self.engine.request(prompt, params)
        async for _ in self._news(request):
            pass
        return request.result

    async def _news(self, request: Request) -> AsyncIterator[None]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(request: Request) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.put_nowait, request.result.finish_reason)

        self._background.submit(request, deliver)
        reason = None
        try:
            while reason is None:
                reason = await news.get()
                if reason == "error":
                    raise RuntimeError("A step of the engine failed.") from self._background.failure
                yield
        finally:
            if reason is None:
                self._background.abort(request)
