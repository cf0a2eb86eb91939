"""Triton kernel of cache append and block attention, in one launch: it writes the block's keys and values into the
caches and attends over the valid rows only.

    append_and_attend(q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, D], key_cache, value_cache [B, Hkv, C, D] (written),
                      at [B] int64, sinks [Hq] | None, tree_mask [B, S, S] | None, *, causal, scale, window, softcap)
        -> [B, Hq, S, D]

It means `kv_append` of k and v at `at`, then `block_attention` of q. Row s sits at position at + s. Rows before the block
are read from the cache, the block's own from k and v, so that no program waits for another's writes. `tree_mask` says
which rows of the block a row sees (itself among them) in place of `causal`; the cached rows it sees all, or, with a
window, those of the positions the rows are stored at.

A program takes one key/value head of one sequence, BLOCK_M of its G*S query rows (the G heads of a group share the keys
they read), and one of `splits` parts of the cached rows; the last part takes the block. With more than one part each
leaves its softmax's maximum, sum and unscaled output in float32, and `combine` joins them (flash-decoding).

float16, bfloat16 and float32; products accumulate in float32.
"""

import torch
import triton
import triton.language as tl

from speccompile.plugins.block_attention.contract import MOST_PROCESSORS

LOG2E = tl.constexpr(1.4426950408889634)
BIDIRECTIONAL, CAUSAL, TREE = range(3)
MAX_SPLITS = 64
APPEND_ROWS = 16


@triton.jit
def _tile(
    q, key, value, m, total, acc, visible, scale, softcap
):  # fmt: skip
    """Online softmax over one tile of keys [D, N] and values [N, D], in powers of two."""
    scores = tl.dot(q, key, input_precision="ieee") * scale
    if softcap > 0:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(visible, scores * LOG2E, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen nothing yet has no maximum to subtract.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return new_m, total, acc


@triton.jit
def attend(
    q, k, v, key_cache, value_cache, at, sinks, tree_mask, out, partial_m, partial_l, partial_acc,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    rows, capacity, kv_heads, groups, splits, mask_kind, window, sink_heads, scale, softcap,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of G*S rows, B * Hkv, splits). Strides count elements; the last axis has stride 1.

    What a compiled kernel can decide as it runs is no constant, so that few variants serve every model: mask_kind
    0 bidirectional, 1 causal, 2 tree; window and softcap 0 none; sink_heads Hq or 0. SPLIT says whether the parts are joined later.
    """
    tile, sequence_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, kv_head = sequence_head // kv_heads, sequence_head % kv_heads
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_head = d < SIZE
    length = tl.load(at + b).to(tl.int32)  # cached rows before the block

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < groups * rows
    head, s = kv_head * groups + row // rows, row % rows
    position = length + s
    q_at = q + b.to(tl.int64) * q_batch + head[:, None] * q_head + s[:, None] * q_row + d[None, :]
    query = tl.load(q_at, mask=real[:, None] & in_head[None, :], other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # This part's share of the cached rows, in whole tiles, from the first row that any window reaches.
    reach = window if window > 0 else 1 << 30
    first = tl.maximum(length - reach + 1, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.cdiv(length - first, BLOCK_N), splits)
    begin = first + split * tiles * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, length)
    cached = sequence_head.to(tl.int64) * capacity * SIZE
    for start in range(begin, end, BLOCK_N):
        j = start + n
        there = j < end
        place = cached + j[:, None].to(tl.int64) * SIZE + d[None, :]
        inside = there[:, None] & in_head[None, :]
        key = tl.load(key_cache + place, mask=inside, other=0.0)
        value = tl.load(value_cache + place, mask=inside, other=0.0)
        visible = there[None, :] & real[:, None] & (position[:, None] - j[None, :] < reach)
        m, total, acc = _tile(query, tl.trans(key), value, m, total, acc, visible, scale, softcap)

    if split == splits - 1:
        for start in range(0, rows, BLOCK_N):
            t = start + n
            there = t < rows
            inside = there[:, None] & in_head[None, :]
            key_from = k + b.to(tl.int64) * k_batch + kv_head * k_head + t[:, None] * k_row + d[None, :]
            value_from = v + b.to(tl.int64) * v_batch + kv_head * v_head + t[:, None] * v_row + d[None, :]
            key = tl.load(key_from, mask=inside, other=0.0)
            value = tl.load(value_from, mask=inside, other=0.0)
            if tile == 0:
                place = cached + (length + t)[:, None].to(tl.int64) * SIZE + d[None, :]
                tl.store(key_cache + place, key, mask=inside)
                tl.store(value_cache + place, value, mask=inside)
            ahead = t[None, :] - s[:, None]
            visible = there[None, :] & real[:, None] & (ahead < reach) & (-ahead < reach)
            visible = visible & (ahead <= (0 if mask_kind == 1 else 1 << 30))
            if mask_kind == 2:
                allowed = tree_mask + (b * rows + s[:, None]) * rows + t[None, :]
                visible = visible & (tl.load(allowed, mask=visible, other=0) != 0)
            m, total, acc = _tile(query, tl.trans(key), value, m, total, acc, visible, scale, softcap)

    if not SPLIT:
        sink = tl.load(sinks + head, mask=real & (head < sink_heads), other=-1e30).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        total = total * tl.exp2(m - top) + tl.exp2(sink - top)
        acc = acc * tl.exp2(m - top)[:, None]
        out_at = (
            out + b.to(tl.int64) * out_batch + head[:, None] * out_head + s[:, None] * out_row + d[None, :]
        )
        result = acc / total[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None] & in_head[None, :])
    else:
        part = (sequence_head * splits + split) * groups * rows + row
        tl.store(partial_m + part, m, mask=real)
        tl.store(partial_l + part, total, mask=real)
        tl.store(
            partial_acc + part[:, None].to(tl.int64) * SIZE + d[None, :],
            acc,
            mask=real[:, None] & in_head[None, :],
        )


@triton.jit
def combine(
    partial_m, partial_l, partial_acc, sinks, out, out_batch, out_head, out_row, rows, kv_heads, groups,
    splits, sink_heads, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one query row. Grid (G*S, B * Hkv)."""
    row, sequence_head = tl.program_id(0), tl.program_id(1)
    b, head = sequence_head // kv_heads, sequence_head % kv_heads * groups + row // rows
    split, d = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    part = (sequence_head * splits + split) * groups * rows + row
    there = split < splits
    m = tl.load(partial_m + part, mask=there, other=float("-inf"))
    total = tl.load(partial_l + part, mask=there, other=0.0)
    inside = there[:, None] & (d < SIZE)[None, :]
    acc = tl.load(partial_acc + part[:, None].to(tl.int64) * SIZE + d[None, :], mask=inside, other=0.0)
    sink = tl.load(sinks + head, mask=head < sink_heads, other=-1e30).to(tl.float32) * LOG2E
    top = tl.maximum(tl.max(m, 0), sink)
    weight = tl.exp2(m - top)
    total = tl.exp2(sink - top) + tl.sum(total * weight, 0)
    result = tl.sum(acc * weight[:, None], 0) / total
    out_at = out + b.to(tl.int64) * out_batch + head * out_head + row % rows * out_row + d
    tl.store(out_at, result.to(out.dtype.element_ty), mask=d < SIZE)


@triton.jit
def append(
    cache, new, at, new_batch, new_head, new_row, rows, capacity, heads,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`kv_append` into the cache itself. Grid (tiles of BLOCK_N rows, B * Hkv)."""
    tile, sequence_head = tl.program_id(0), tl.program_id(1)
    b, head = sequence_head // heads, sequence_head % heads
    t, d = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = (t < rows)[:, None] & (d < SIZE)[None, :]
    value = tl.load(
        new + b.to(tl.int64) * new_batch + head * new_head + t[:, None] * new_row + d[None, :], mask=inside
    )
    row = tl.load(at + b) + t
    tl.store(
        cache + (sequence_head.to(tl.int64) * capacity + row[:, None]) * SIZE + d[None, :], value, mask=inside
    )


def tiles(groups: int, rows: int, size: int) -> dict[str, int]:
    """Block sizes for a head of `size`, up to 256, and `groups * rows` query rows: 16, what a tensor-core product takes,
    or 64; with as many keys at a time as fit in registers (`cubins` shows that nothing spills)."""
    wide = max(16, triton.next_power_of_2(size))
    if groups * rows <= 16:
        return {
            "BLOCK_D": wide,
            "BLOCK_M": 16,
            "BLOCK_N": min(64, 8192 // wide),
            "num_warps": 4,
            "num_stages": 2,
        }
    warps = 8 if wide >= 128 else 4
    return {
        "BLOCK_D": wide,
        "BLOCK_M": 64,
        "BLOCK_N": min(64, 4096 // wide),
        "num_warps": warps,
        "num_stages": 2,
    }


def splits_for(batch: int, kv_heads: int, row_tiles: int, capacity: int, processors: int) -> int:
    """Parts of the cache so that every multiprocessor has work, each at least 256 rows; fixed by the capacity, not the
    length, so that one CUDA graph serves a sequence as it grows."""
    wanted = -(-min(processors, MOST_PROCESSORS) // max(1, batch * kv_heads * row_tiles))
    return max(1, min(wanted, capacity // 256, MAX_SPLITS))


def append_rows(cache: torch.Tensor, new: torch.Tensor, at: torch.Tensor) -> None:
    """Launch `append`: `kv_append_` for a contiguous cache."""
    batch, heads, rows, size = new.shape
    new = new if new.stride(-1) == 1 else new.contiguous()
    append[triton.cdiv(rows, APPEND_ROWS), batch * heads](
        cache, new, at, *new.stride()[:3], rows, cache.shape[2], heads,
        SIZE=size, BLOCK_D=triton.next_power_of_2(size), BLOCK_N=APPEND_ROWS,
    )  # fmt: skip


def append_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    at: torch.Tensor,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel. The caches must be contiguous; q, k and v need unit stride in their last axis only.

    `splits` None: as many as fill the device. `out` and `workspace` (float32, of `workspace_bytes`) None: allocated.
    """
    batch, heads, rows, size = q.shape
    kv_heads, capacity = key_cache.shape[1], key_cache.shape[2]
    groups = heads // kv_heads
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    block = tiles(groups, rows, size)
    row_tiles = triton.cdiv(groups * rows, block["BLOCK_M"])
    if splits is None:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        splits = splits_for(batch, kv_heads, row_tiles, capacity, processors)
    if out is None:
        out = q.new_empty(batch, rows, heads, size).transpose(1, 2)  # as the output projection wants it
    parts = batch * kv_heads * splits * groups * rows if splits > 1 else 0
    if workspace is None:
        workspace = torch.empty(parts * (size + 2), dtype=torch.float32, device=q.device)
    acc, m, total = workspace[: parts * (size + 2)].split([parts * size, parts, parts])
    nothing = q.new_empty(0)  # read by no lane
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:3]]
    mask_kind = TREE if tree_mask is not None else CAUSAL if causal else BIDIRECTIONAL
    sink_heads = 0 if sinks is None else heads
    sinks = nothing if sinks is None else sinks
    attend[row_tiles, batch * kv_heads, splits](
        q, k, v, key_cache, value_cache, at, sinks, q.new_empty(0, dtype=torch.int8) if tree_mask is None else tree_mask,
        out, m, total, acc, *strides,
        rows, capacity, kv_heads, groups, splits, mask_kind, window or 0, sink_heads, float(scale), float(softcap or 0),
        SIZE=size, SPLIT=splits > 1, **block,
    )  # fmt: skip
    if splits > 1:
        combine[groups * rows, batch * kv_heads](
            m, total, acc, sinks, out, *out.stride()[:3], rows, kv_heads, groups, splits, sink_heads,
            SIZE=size, BLOCK_D=block["BLOCK_D"], BLOCK_SPLITS=MAX_SPLITS,
        )  # fmt: skip
    return out
