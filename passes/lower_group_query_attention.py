"""ONNX Runtime's form of cache append and attention, reading valid rows only and writing in place.

causal, the block appended by the same update (target, causal drafts)
    before: K = kv_append(key_cache, k, at); V = kv_append(value_cache, v, at); block_attention(q, K, V, at)
    after:  out, K, V = group_query_attention(q, k, v, key_cache, value_cache)

bidirectional without a window (DFlash drafts)
    ONNX Runtime's bidirectional mode takes one sequence at a time. But block rows that all see the same keys are
    to attention what further query heads are, so the K rows become K times as many heads of one row, the last:
    before: K = kv_append(…); V = kv_append(…); block_attention(q [B, Hq, K, D], K, V, at, causal=False)
    after:  out, K', V' = group_query_attention(q [B, 1, Hq*K*D], last row of k, last row of v, K, V)

Anything else keeps the portable form. Every value a cache passes through on its way to the output must live in
the cache's one buffer, so the intermediate ones become outputs too (`draft.0.key.1`, …), aliases of the cache.
"""

import operator

import torch
from torch import fx

from speccompile.passes.program import Program, is_call
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.group_query_attention import group_query_attention
from speccompile.plugins.kv_append import kv_append

aten = torch.ops.aten
BLOCK_ATTENTION = block_attention._opoverload
GROUP_QUERY_ATTENTION = group_query_attention._opoverload
KV_APPEND = kv_append._opoverload


def lower_group_query_attention(program: Program) -> int:
    nodes = [n for n in program.graph.nodes if is_call(n, BLOCK_ATTENTION) and _has_fused_form(n)]
    lengths: dict[tuple, tuple[fx.Node, ...]] = {}
    for node in nodes:
        with program.graph.inserting_before(node):
            _lower(program, node, lengths)
    program.clean()
    _return_intermediates(program)
    program.clean()
    return len(nodes)


def _has_fused_form(node: fx.Node) -> bool:
    q, key, value, at = node.args[:4]
    if not (is_call(key, KV_APPEND) and is_call(value, KV_APPEND) and key.args[2] is value.args[2] is at):
        return False
    q, k, v = (n.meta["val"] for n in (q, key.args[1], value.args[1]))
    same_rows = str(q.shape[2]) == str(k.shape[2]) == str(v.shape[2])
    supported = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0 and q.dtype in (torch.float32, torch.float16)
    folds = node.kwargs.get("window") is None and isinstance(q.shape[2], int)
    return same_rows and supported and (node.kwargs["causal"] or folds)


def _lower(program: Program, node: fx.Node, lengths: dict) -> None:
    q, key, value, at = node.args[:4]
    sinks = node.args[4] if len(node.args) > 4 else None
    causal = node.kwargs["causal"]
    heads, rows = q.meta["val"].shape[1], q.meta["val"].shape[2]
    kv_heads = key.meta["val"].shape[1]
    k, v = _rows_first(program, key.args[1]), _rows_first(program, value.args[1])
    if causal:
        past_key, past_value = key.args[0], value.args[0]
        q = _rows_first(program, q)
    else:  # the block is in the cache already; its last row is written once more, and stands for them all
        past_key, past_value = key, value
        q = _fold(program, q)
        k, v = _last_row(program, k), _last_row(program, v)
        heads *= rows
        if sinks is not None:
            sinks = program.call(
                aten.repeat_interleave.self_int, sinks, rows, val=sinks.meta["val"].new_empty(heads)
            )
    key_of_lengths = at, str(rows), causal
    if key_of_lengths not in lengths:
        lengths[key_of_lengths] = _sequence_lengths(program, at, node.args[0], 1 if not causal else None)
    vals = torch.empty_like(q.meta["val"]), past_key.meta["val"], past_value.meta["val"]
    call = program.call(
        GROUP_QUERY_ATTENTION, q, k, v, past_key, past_value, *lengths[key_of_lengths], sinks, val=vals,
        num_heads=heads, kv_num_heads=kv_heads, scale=node.kwargs["scale"],
        window=node.kwargs.get("window"), softcap=node.kwargs.get("softcap"),
    )  # fmt: skip
    out, present_key, present_value = (
        program.call(operator.getitem, call, i, val=val) for i, val in enumerate(vals)
    )
    node.replace_all_uses_with(_unfold(program, out, node.meta["val"], folded=not causal))
    program.graph.erase_node(node)
    for cache, present in ((key, present_key), (value, present_value)):
        cache.replace_all_uses_with(present, delete_user_cb=lambda user: user is not call)


def _sequence_lengths(program: Program, at: fx.Node, q: fx.Node, new_rows: int | None) -> tuple[fx.Node, ...]:
    """int32 nodes: every sequence's length less one [B], the longest length [], rows it adds [B] (None: all of q's)."""
    rows = q.meta["val"].shape[2]
    if not isinstance(rows, int):
        rows = program.call(aten.sym_size.int, q, 2, val=rows)
    vector = at.meta["val"]
    end = program.call(aten.add.Tensor, at, rows, val=vector)

    def int32(node: fx.Node) -> fx.Node:
        return program.call(aten.to.dtype, node, torch.int32, val=node.meta["val"].to(torch.int32))

    last = program.call(aten.sub.Tensor, end, 1, val=vector)
    longest = program.call(aten.amax.default, end, [0], val=vector.amax(0))
    added = program.call(aten.sub.Tensor, end, at if new_rows is None else last, val=vector)
    return int32(last), int32(longest), int32(added)


def _rows_first(program: Program, x: fx.Node) -> fx.Node:
    """[B, H, S, D] -> [B, S, H*D]"""
    turned = program.call(aten.transpose.int, x, 1, 2, val=x.meta["val"].transpose(1, 2))
    return program.call(aten.flatten.using_ints, turned, 2, val=turned.meta["val"].flatten(2))


def _last_row(program: Program, x: fx.Node) -> fx.Node:
    """[B, S, N] -> [B, 1, N]"""
    return program.call(aten.slice.Tensor, x, 1, -1, 2**63 - 1, val=x.meta["val"][:, -1:])


def _fold(program: Program, q: fx.Node) -> fx.Node:
    """[B, Hq, K, D] -> [B, 1, Hq*K*D]: the rows of a head become heads, and stay with their kv group."""
    flat = program.call(aten.flatten.using_ints, q, 1, val=q.meta["val"].flatten(1))
    return program.call(aten.unsqueeze.default, flat, 1, val=flat.meta["val"].unsqueeze(1))


def _unfold(program: Program, out: fx.Node, val: torch.Tensor, folded: bool) -> fx.Node:
    """The op's [B, S, Hq*D] or folded [B, 1, Hq*K*D] -> [B, Hq, K, D]"""
    heads, rows, size = val.shape[1:]
    if folded:
        flat = program.call(aten.squeeze.dim, out, 1, val=out.meta["val"].squeeze(1))
        return program.call(aten.unflatten.int, flat, 1, [heads, rows, size], val=val)
    split = program.call(
        aten.unflatten.int, out, 2, [heads, size], val=out.meta["val"].unflatten(2, (heads, size))
    )
    return program.call(aten.transpose.int, split, 1, 2, val=val)


def _return_intermediates(program: Program) -> None:
    """Every value between a cache input and its output is returned too, to be bound to the same buffer."""
    for name, cache in list(program.aliases.items()):
        value, source = program.returned(name), program.placeholder(cache)
        chain = []
        while value is not source:
            chain.append(value)
            value = _previous(value)
        for index, middle in enumerate(reversed(chain[1:]), start=1):
            program.add_output(f"{cache}.{index}", middle, alias=cache)


def _previous(value: fx.Node) -> fx.Node:
    """The cache value this one was made from."""
    if value.target is operator.getitem:
        call, index = value.args
        return call.args[2 + index]  # outputs 1 and 2 are made from inputs 3 and 4
    return value.args[0]
