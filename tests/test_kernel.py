"""The block-attention kernel against its reference, in Triton's interpreter, and compiled for every architecture."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.kv_append import kv_append

pytest.importorskip("triton")
from speccompile.plugins.block_attention.kernel import append_and_attend  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def bfloat16_products():
    """The interpreter keeps bfloat16 as bits and multiplies those (Triton 3.9): decode them first."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *more):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@st.composite
def cases(draw):
    batch, groups, kv_heads = (draw(st.integers(1, n)) for n in (3, 4, 2))
    rows = draw(st.sampled_from([1, 2, 5, 8, 16, 33]))
    size = draw(st.sampled_from([8, 24, 64, 80]))
    capacity = rows + draw(st.sampled_from([0, 7, 64, 150]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    q = torch.randn(batch, rows, kv_heads * groups, size, dtype=dtype).transpose(
        1, 2
    )  # as projections leave them
    k, v = torch.randn(2, batch, kv_heads, rows, size, dtype=dtype)
    caches = torch.randn(2, batch, kv_heads, capacity, size, dtype=dtype)
    at = torch.tensor([draw(st.integers(0, capacity - rows)) for _ in range(batch)])
    options = dict(
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([0.2, 0.5])),
        window=draw(st.sampled_from([None, 1, 3, 70])),
        softcap=draw(st.sampled_from([None, 2.0])),
    )
    sinks = torch.randn(kv_heads * groups, dtype=dtype) if draw(st.booleans()) else None
    return (q, k, v, *caches, at, sinks), options, draw(st.sampled_from([1, 2, 5]))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_kernel_is_append_and_attend(case):
    (q, k, v, key_cache, value_cache, at, sinks), options, splits = case
    key, value = kv_append(key_cache, k, at), kv_append(value_cache, v, at)
    single = [x.float() if x is not None else None for x in (q, key, value)]
    expected = block_attention(*single, at, None if sinks is None else sinks.float(), **options)
    out = append_and_attend(q, k, v, key_cache, value_cache, at, sinks, splits=splits, **options)
    assert torch.equal(key_cache, key) and torch.equal(value_cache, value)
    assert out.dtype == q.dtype
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance * 2, rtol=tolerance)


@settings(max_examples=15, deadline=None)
@given(cases(), st.integers(0, 10**6))
def test_a_tree_mask_replaces_causality(case, seed):
    (q, k, v, key_cache, value_cache, at, _), options, splits = case
    options["window"] = None
    batch, heads, rows, _ = q.shape
    generator = torch.Generator().manual_seed(seed)
    tree = (torch.rand(batch, rows, rows, generator=generator) < 0.5) | torch.eye(rows, dtype=torch.bool)
    key, value = kv_append(key_cache, k, at).float(), kv_append(value_cache, v, at).float()
    groups = heads // k.shape[1]
    visible = torch.arange(key.shape[2]) < at[:, None, None].expand(batch, rows, 1)
    visible = torch.stack(
        [row.index_copy(1, a + torch.arange(rows), t) for row, a, t in zip(visible, at, tree)]
    )
    scores = q.float() @ key.repeat_interleave(groups, 1).mT * options["scale"]
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    expected = weights @ value.repeat_interleave(groups, 1)
    out = append_and_attend(
        q, k, v, key_cache, value_cache, at, tree_mask=tree.to(torch.int8), splits=splits, **options
    )
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.float(), expected, atol=tolerance * 2, rtol=tolerance)
