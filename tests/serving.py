"""A server on a thread of the test's process."""

import contextlib
import socket
import threading
import time

import uvicorn

from speccompile.runtime import Engine
from speccompile.runtime.server import ServerOptions, create_app


@contextlib.contextmanager
def serving(path, **options):
    """A server on a free port, on a thread: (its URL, its application)."""
    app = create_app(Engine.load(path, threads=1), ServerOptions(**{"model_name": "tiny"} | options))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
