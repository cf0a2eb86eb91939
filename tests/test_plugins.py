"""Every op against a loop that spells out its meaning, and its ONNX form against the op, in ONNX Runtime."""

import math

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from speccompile.export.onnx import to_onnx
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.group_query_attention import group_query_attention
from speccompile.plugins.kv_append import kv_append


def attend_by_hand(q, key, value, q_at, causal, scale, window, softcap, sinks):
    """One head, one row, one key at a time."""
    batch, heads, rows, _ = q.shape
    out = torch.zeros(batch, heads, rows, value.shape[-1])
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // key.shape[1])
            for r in range(rows):
                position, seen, scores = q_at[b].item() + r, [], []
                for k in range(key.shape[2]):
                    if k > (position if causal else q_at[b].item() + rows - 1):
                        continue
                    if window is not None and (
                        position - k >= window or (not causal and k - position >= window)
                    ):
                        continue
                    s = float(q[b, h, r] @ key[b, g, k]) * scale
                    scores.append(softcap * math.tanh(s / softcap) if softcap else s)
                    seen.append(k)
                weights = torch.tensor([*scores, *([float(sinks[h])] if sinks is not None else [])]).softmax(
                    0
                )
                out[b, h, r] = sum(w * value[b, g, k] for w, k in zip(weights, seen))
    return out


@st.composite
def attention_cases(draw):
    batch, rows, groups, kv_heads = (draw(st.integers(1, n)) for n in (3, 5, 3, 2))
    capacity, causal = rows + draw(st.integers(0, 9)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 10**6)))
    q = torch.randn(batch, kv_heads * groups, rows, 8)
    key, value = torch.randn(2, batch, kv_heads, capacity, 8)
    at = torch.tensor([draw(st.integers(0, capacity - rows)) for _ in range(batch)])
    options = dict(
        causal=causal,
        scale=draw(st.sampled_from([0.2, 0.5])),
        window=draw(st.sampled_from([None, 1, 3])),
        softcap=draw(st.sampled_from([None, 2.0])),
    )
    sinks = torch.randn(kv_heads * groups) if draw(st.booleans()) else None
    return (q, key, value, at, sinks), options


@settings(max_examples=40, deadline=None)
@given(attention_cases())
def test_block_attention_means_what_it_says(case):
    (q, key, value, at, sinks), options = case
    expected = attend_by_hand(q, key, value, at, sinks=sinks, **options)
    torch.testing.assert_close(
        block_attention(q, key, value, at, sinks, **options), expected, atol=2e-6, rtol=1e-5
    )


def test_kv_append_writes_each_sequence_at_its_own_place():
    cache, new = torch.zeros(2, 1, 6, 3), torch.arange(12.0).view(2, 1, 2, 3) + 1
    result = kv_append(cache, new, torch.tensor([0, 3]))
    assert torch.equal(result[0, 0, :2], new[0, 0]) and not result[0, 0, 2:].any()
    assert (
        torch.equal(result[1, 0, 3:5], new[1, 0])
        and not result[1, 0, :3].any()
        and not result[1, 0, 5:].any()
    )
    assert not cache.any()


def run_onnx(function, inputs):
    """The ONNX form of a function of tensors, run by ONNX Runtime."""

    class Module(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    program = torch.export.export(Module(), tuple(inputs), strict=False)
    graph_module = program.module(check_guards=False)
    names = [f"in{i}" for i in range(len(inputs))]
    graph = fx.Graph()
    values = {}
    returned = graph.graph_copy(graph_module.graph, values)
    graph.output(returned)
    count = len(returned)
    outputs = [f"out{i}" for i in range(count)]
    dims = {n: list(t.shape) for n, t in zip(names, inputs)} | {n: None for n in outputs}
    for name, node in zip(outputs, returned):
        dims[name] = list(node.meta["val"].shape)
    model = to_onnx(fx.GraphModule(graph_module, graph), names, outputs, dims)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {n: t.numpy() for n, t in zip(names, inputs)}), {n.op_type for n in model.graph}


@settings(max_examples=25, deadline=None)
@given(attention_cases())
def test_portable_onnx_form_of_block_attention(case):
    tensors, options = [t for t in case[0] if t is not None], case[1]
    (got,), operations = run_onnx(lambda *t: (block_attention(*t, **options),), tensors)
    assert "Attention" in operations
    torch.testing.assert_close(
        torch.from_numpy(got), block_attention(*tensors, **options), atol=3e-6, rtol=1e-5
    )


def test_onnx_form_of_kv_append():
    cache, new, at = torch.randn(2, 2, 7, 4), torch.randn(2, 2, 3, 4), torch.tensor([4, 0])
    (got,), operations = run_onnx(lambda *t: (kv_append(*t),), (cache, new, at))
    assert "TensorScatter" in operations
    assert np.array_equal(got, kv_append(cache, new, at).numpy())


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_onnx_form_of_group_query_attention(window, with_sinks):
    torch.manual_seed(0)
    batch, rows, heads, kv_heads, size = 3, 4, 4, 2, 8
    q, k, v = torch.randn(batch, rows, heads * size), *torch.randn(2, batch, rows, kv_heads * size)
    past = torch.randn(2, batch, kv_heads, 20, size)
    at = torch.tensor([0, 9, 16])
    last = (at + rows - 1).to(torch.int32)
    tensors = [
        q,
        k,
        v,
        past[0],
        past[1],
        last,
        (last + 1).max(),
        torch.full((batch,), rows, dtype=torch.int32),
    ]
    tensors += [torch.randn(heads)] if with_sinks else []
    options = dict(num_heads=heads, kv_num_heads=kv_heads, scale=0.3, window=window, softcap=None)
    expected = group_query_attention(*tensors, **options)
    got, operations = run_onnx(lambda *t: group_query_attention(*t, **options), tensors)
    assert "GroupQueryAttention" in operations
    torch.testing.assert_close(torch.from_numpy(got[0]), expected[0], atol=3e-6, rtol=1e-5)
    for cache, wanted in zip(got[1:], expected[1:]):
        for b in range(batch):  # rows past a sequence's end are unspecified
            end = at[b] + rows
            torch.testing.assert_close(torch.from_numpy(cache)[b, :, :end], wanted[b, :, :end])
