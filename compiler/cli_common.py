"""What the command-line modules share: consoles, options, and the reading of lists."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from speccompile.export.errors import UserError

out, err = Console(highlight=False), Console(stderr=True, highlight=False)

EnginePath = Annotated[
    Path, typer.Argument(metavar="ENGINE", help="Engine directory written by `speccompile build`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
TrustRemoteCode = Annotated[
    bool, typer.Option(help="Run modelling code that the target's checkpoint brings along.")
]


def parse_numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text is not None else ()
    except ValueError:
        raise UserError(f"{option} {text!r} is not a list of whole numbers such as 1,2,3.") from None
