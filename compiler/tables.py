"""Tables for people: what `build`, `verify` and `inspect` print."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from speccompile.compiler.verify import Verification
from speccompile.export.memory import human


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    return table


def print_build(console: Console, out: Path, report: dict[str, Any]) -> None:
    _print_draft(console, report["draft"])
    table = _table("Stages", "stage", "seconds")
    for stage, seconds in report["stages"].items():
        table.add_row(stage, f"{seconds:.2f}")
    table.add_row("total", f"{sum(report['stages'].values()):.2f}")
    console.print(table, "")
    console.print(_passes(report["passes"]), "")
    sizes = _table("Files", "file", "size")
    for name, size in report["bytes"].items():
        sizes.add_row(name, human(size))
    console.print(sizes, "")
    if "tensorrt" in report:
        _print_tensorrt(console, report["tensorrt"])
    caches = report["cache_bytes_per_sequence"]
    console.print(f"Cache per sequence: target {human(caches['target'])}, draft {human(caches['draft'])}.")
    console.print(f"Engine written to {out}.", soft_wrap=True)


def _print_tensorrt(console: Console, built: dict[str, Any]) -> None:
    table = _table("Engine", "layer", "count")
    for layer, count in built["layers"].items():
        table.add_row(layer, str(count))
    console.print(table)
    for kind in built["attention"]:
        console.print(
            f"{kind['layers']} attentions: {'one additive mask' if kind['mask'] else 'no mask'}, lengths {'given' if kind['lengths'] else 'not given'}, "
            f"causal {kind['causal']}, decomposable {kind['decomposable']}",
            soft_wrap=True,
        )
    if built["plugins"]:
        plugins = ", ".join(f"{count} {name}" for name, count in built["plugins"].items())
        console.print(f"speccompile's plugins: {plugins}; no other kernel touches a cache.")
    if targets := ", ".join(f"{sm // 10}.{sm % 10}" for sm in built["architectures"]):
        console.print(f"Compute capabilities {targets}; built here, not executed: that needs such a GPU.")
    if copies := sum(built["cache_readers"].values()):
        console.print(
            f"TensorRT-RTX copies caches before its attention kernel: {copies} copies in {len(built['profiles'])} profiles.",
            soft_wrap=True,
        )
    console.print("")


def _passes(passes: dict[str, list[dict[str, Any]]]) -> Table:
    table = _table("Passes", "pass", *(f"matches in {name}" for name in passes))
    for rows in zip(*passes.values(), strict=True):
        table.add_row(rows[0]["name"], *(str(row["matches"]) for row in rows))
    return table


def print_draft(console: Console, resolved: dict[str, str]) -> None:
    """One line an entry, whatever the terminal's width: nothing of what was resolved may be cut off."""
    console.print("[bold]Draft, as resolved[/]")
    width = max(map(len, resolved)) + 2
    for label, text in resolved.items():
        console.print(f"{label:<{width}}{escape(text)}", soft_wrap=True)
    console.print("")


def print_drafts(console: Console, rows: list[dict[str, str]]) -> None:
    table = _table("Drafts", "format", "families", "recognised by")
    for column in table.columns:
        column.justify = "left"
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print(
        "`build` recognises the format by itself; `convert-draft` writes any of them as speccompile's own.",
        soft_wrap=True,
    )


def _print_draft(console: Console, draft: dict[str, Any]) -> None:
    cut = draft.get("confidence_threshold")
    more = {} if cut is None else {"cut at": f"the first proposal of confidence below {cut}"}
    print_draft(console, draft["resolved"] | more)


def print_verification(console: Console, outcome: Verification) -> None:
    summary = outcome.to_json()
    for d in outcome.differences:
        kind = "near tie" if d.near_tie else "DIFFERENT"
        console.print(
            f"{kind}: prompt {d.prompt}, position {d.position}, against {d.against}: the engine chose {d.engine_token} (logit "
            f"{d.engine_logit:.5f}), expected {d.expected_token} (logit {d.expected_logit:.5f})",
            soft_wrap=True,
        )
    verdict = (
        "identical"
        if summary["identical"]
        else "identical but for near ties"
        if summary["passed"]
        else "NOT identical"
    )
    length = summary["acceptance_length"]
    console.print(
        f"{verdict}: {outcome.tokens} tokens over {outcome.prompts} prompts, against Transformers eager and plain decoding"
        + (f"; acceptance length {length:.2f}." if length is not None else "."),
        soft_wrap=True,
    )


def print_description(console: Console, d: dict[str, Any]) -> None:
    console.print(
        f"[bold]{d['path']}[/]: {d['architecture']} with a {d['draft']['family']} draft", soft_wrap=True
    )
    console.print(
        f"{d['backend']}, {d['dtype']}, block width {d['block_width']}, up to {d['max_seq_len']} tokens and "
        f"{d['max_batch_size']} sequences; step contract {d['contract_version']}",
        soft_wrap=True,
    )
    console.print(f"Target: {d['target']['path']}", soft_wrap=True)
    console.print(f"Draft: {d['draft']['path']}\n", soft_wrap=True)
    _print_draft(console, d["draft"])
    contract = Table(
        title="Step contract",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in ("", "tensor", "dtype", "shape", "bound to"):
        contract.add_column(column)
    for kind in ("inputs", "outputs"):
        for tensor in _shortened(d[kind]):
            contract.add_row(
                kind[:-1], tensor["name"], tensor["dtype"], str(tensor["shape"]), tensor.get("bound_to", "")
            )
    console.print(contract, "")
    if d["tensorrt"]:
        _print_tensorrt(console, d["tensorrt"])
        kernels = _table("Kernels", "kernel", f"launches in {len(d['tensorrt']['profiles'])} profiles")
        for name, count in d["tensorrt"]["kernels"].items():
            kernels.add_row(name, str(count))
        console.print(kernels, "")
    else:
        operations = _table("Operations", "operation", *d["operations"])
        for name in dict.fromkeys(op for counts in d["operations"].values() for op in counts):
            operations.add_row(name, *(str(counts.get(name, 0)) for counts in d["operations"].values()))
        console.print(operations, "")
    console.print(_passes(d["passes"]), "")
    table = _table("Memory", "batch", "weights", "target caches", "draft caches", "total")
    for row in d["memory"]:
        sizes = [row["weights"], row["target_caches"], row["draft_caches"]]
        table.add_row(str(row["batch"]), *map(human, sizes), human(sum(sizes)))
    console.print(table)


def _shortened(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but the caches of the middle layers, which look like the first."""
    kept, skipped = [], 0
    for tensor in tensors:
        parts = tensor["name"].split(".")
        if len(parts) > 2 and parts[1] not in ("0",):
            skipped += 1
            continue
        kept.append(tensor)
    if skipped:
        kept.append({"name": f"… and {skipped} caches of further layers", "dtype": "", "shape": ""})
    return kept


def print_port(console: Console, ported: dict[str, Any]) -> None:
    table = _table(f"What {ported['server']} was told", "flag", "value", "here", "as")
    for column in table.columns[1:]:
        column.justify = "left"
    for line in ported["flags"]:
        table.add_row(line["flag"], escape(line["value"]), line["outcome"], escape(line["note"]))
    console.print(table, "")
    for note in ported["notes"]:
        console.print(escape(note), soft_wrap=True)
    for warning in ported["warnings"]:
        console.print(f"[bold]note:[/] {escape(warning)}", soft_wrap=True)
    console.print("")
    if ported["environment"]:
        console.print(f"export {' '.join(f'{name}=…' for name in ported['environment'])}", soft_wrap=True)
    for command in ("build", "verify", "serve"):
        console.print(escape(ported[command]), soft_wrap=True)
