"""What `bench` prints, and its CSV. It does without torch, as the measurement does."""

import csv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from speccompile.export.errors import UserError
from speccompile.export.memory import human


def print_bench(console: Console, report: dict[str, Any]) -> None:
    held = report["memory"]
    console.print(
        f"{report['prompts']} prompts of {report['prompt_tokens']['median']:.0f} tokens (median), up to {report['max_new_tokens']} new ones; "
        f"{report['repeats']} runs each, interleaved\n"
        f"Weights {human(held['weights'])}; cache per sequence: target {human(held['target_cache_per_sequence'])}, "
        f"draft {human(held['draft_cache_per_sequence'])}",
        soft_wrap=True,
    )
    table = Table(
        "batch", "mode", "tokens/s", "× plain", "acceptance", "first ms p50/p99", "per token",
        box=None, pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for row in report["rows"]:
        table.add_row(
            str(row["batch"]),
            row["mode"] + (f", {row['block_width']} rows" if row["block_width"] else ""),
            _spread(row["output_tokens_per_s"], 1),
            _spread(row["speedup"], 2) if "speedup" in row else "",
            f"{row['acceptance_length']:.2f}" if row["acceptance_length"] else "",
            _milliseconds(row["time_to_first_token_s"]),
            _milliseconds(row["time_per_output_token_s"]),
        )
    console.print(table)
    console.print(
        "median over the runs, ± the farthest; milliseconds to the first token and per token after it, p50/p99\n",
        soft_wrap=True,
    )
    for row in report["rows"]:
        if row["accepted_at_position"] and row["block_width"] is None:
            shares = " ".join(f"{share:.2f}" for share in row["accepted_at_position"])
            console.print(f"accepted at proposal 1 …, batch {row['batch']}: {shares}", soft_wrap=True)
        if row.get("texts_that_differ"):
            console.print(
                f"[bold]{row['texts_that_differ']} texts differ from plain decoding's at batch {row['batch']}[/]: near ties in half precision do that; "
                "`speccompile verify` says whether it is more, and then no gain counts.",
                soft_wrap=True,
            )


def _spread(values: dict[str, float], digits: int) -> str:
    """The median, and how far the runs lie from it at most."""
    middle = values["median"]
    off = max(values["max"] - middle, middle - values["min"]) / middle
    return f"{middle:.{digits}f} ±{off:.0%}"


def _milliseconds(times: dict[str, float] | None) -> str:
    return "" if times is None else f"{times['p50'] * 1e3:.1f}/{times['p99'] * 1e3:.1f}"


def write_bench_csv(path: Path, report: dict[str, Any]) -> None:
    """One line a setting, times in seconds. Raises UserError where it cannot be written."""
    lines = [_flat(row) for row in report["rows"]]
    names = list(dict.fromkeys(name for line in lines for name in line))
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror}).") from None


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}_{part}": number for part, number in value.items()}
        elif name == "accepted_at_position":
            flat[name] = " ".join(f"{share:.4f}" for share in value)
        else:
            flat[name] = value
    return flat
