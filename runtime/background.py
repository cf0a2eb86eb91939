"""A scheduler on a thread of its own, for servers: requests are submitted from anywhere, news of them is delivered as it comes."""

import logging
import threading
from collections.abc import Callable

from speccompile.runtime.scheduler import Request, Scheduler

log = logging.getLogger("speccompile")
Deliver = Callable[[Request], None]


class Full(Exception):
    """More requests are waiting than the limit allows."""


class Background:
    """Runs `scheduler` until `stop`.

    `submit(request, deliver)` has `deliver(request)` called, on the thread, after every step that gave the request tokens and
    once when it ends; it must return at once. With `max_waiting` requests more than there are slots, another raises `Full`.
    """

    def __init__(self, scheduler: Scheduler, max_waiting: int = 256):
        self.scheduler, self.max_waiting = scheduler, max_waiting
        self.failure: BaseException | None = None
        """What ended the thread, if anything did."""
        self._news = threading.Condition()
        self._arrivals: list[tuple[Request, Deliver]] = []
        self._departures: list[Request] = []
        self._delivers: dict[Request, Deliver] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="speccompile", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return len(self.scheduler.active)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._arrivals)

    @property
    def _crowded(self) -> bool:
        here = len(self._delivers) + len(self._arrivals)
        return here >= self.scheduler.session.batch + self.max_waiting

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def submit(self, request: Request, deliver: Deliver) -> None:
        with self._news:
            if self._stopping or self.failure is not None or self._crowded:
                raise Full
            self._arrivals.append((request, deliver))
            self._news.notify()

    def abort(self, request: Request) -> None:
        """End a request; nothing more is delivered of it. One that has ended already is left as it is."""
        with self._news:
            self._departures.append(request)
            self._news.notify()

    def stop(self, timeout: float | None = None) -> None:
        """Finish what is there, take nothing more, and end the thread; after `timeout` seconds abort what is left."""
        with self._news:
            self._stopping = True
            self._news.notify()
        self._thread.join(timeout)
        for request in list(self._delivers):
            self.abort(request)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                for request in self.scheduler.step():
                    self._deliver(request)
        except BaseException as error:  # every request must hear of it, and the server go on to say so
            log.exception("A step failed; no more requests are served.")
            with self._news:
                self.failure = error
                left = [*self._delivers.items(), *self._arrivals]
            for request, deliver in left:
                request.result.finish_reason = request.result.finish_reason or "error"
                deliver(request)

    def _wait(self) -> bool:
        """Take arrivals and departures; False when there is nothing left to do and nothing more will come."""
        with self._news:
            while not (self.scheduler.busy or self._arrivals or self._departures or self._stopping):
                self._news.wait()
            arrivals, self._arrivals = self._arrivals, []
            departures, self._departures = self._departures, []
            for request, deliver in arrivals:
                self._delivers[request] = deliver
                self.scheduler.add(request)
        for request in departures:
            if self._delivers.pop(request, None):
                self.scheduler.abort(request)
        return self.scheduler.busy or not self._stopping

    def _deliver(self, request: Request) -> None:
        deliver = self._delivers[request] if request.live else self._delivers.pop(request)
        deliver(request)
