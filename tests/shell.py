"""The command line as tests call it."""

import contextlib
import io
import os
import signal
import sys
from types import SimpleNamespace
from unittest import mock

from speccompile.compiler import cli


def speccompile(*arguments, code=0, env=None):
    """The command's entry point, in this process: a start of Python and torch would cost seconds each time."""
    printed, said = io.StringIO(), io.StringIO()
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch.object(sys, "argv", ["speccompile", *map(str, arguments)]),
        mock.patch.dict(os.environ, env or {}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
    ):
        try:
            cli.main()
            found = 0
        except SystemExit as ended:
            found = ended.code or 0
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
    assert found == code, said.getvalue()
    return SimpleNamespace(stdout=printed.getvalue(), stderr=said.getvalue())
