"""The torch back end: the op in place, the pass, engines of many pairs, and the Triton kernel inside a whole step."""

import pytest
import tiny
import torch
from builder import eager_greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import speccompile

from speccompile.compiler.build import BuildOptions, build
from speccompile.plugins.block_attention import append_and_attend as op
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.kv_append import kv_append
from speccompile.runtime import Engine

PROMPTS = ([3], [1, 2, 7, 3, 3], [0, 4, 1, 3, 2, 3, 6] * 3)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 9), st.booleans(),
    st.sampled_from([None, 1, 3, 9]), st.sampled_from([None, 2.0]), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_the_op_is_append_then_attend(batch, groups, heads, rows, causal, window, softcap, with_sinks, seed):
    torch.manual_seed(seed)
    q = torch.randn(batch, heads * groups, rows, 8)
    k, v = torch.randn(2, batch, heads, rows, 8)
    key_cache, value_cache = torch.randn(2, batch, heads, 20, 8)
    at = torch.randint(0, 20 - rows + 1, (batch,))
    sinks = torch.randn(heads * groups) if with_sinks else None
    options = dict(causal=causal, scale=0.3, window=window, softcap=softcap)
    key, value = kv_append(key_cache, k, at), kv_append(value_cache, v, at)
    expected = block_attention(q, key, value, at, sinks, **options)
    found = op.append_and_attend(q, k, v, key_cache, value_cache, at, sinks, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(key_cache, key) and torch.equal(value_cache, value)


def test_the_ops_contract_holds():
    """PyTorch's own check of schema, shapes and mutation."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    caches = torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    torch.library.opcheck(
        op.append_and_attend, (q, k, v, *caches, torch.tensor([0, 4])), dict(causal=True, scale=0.3),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def torch_engine(reference, path, **options):
    paths = str(reference.target_path), str(reference.draft_path)
    build(BuildOptions(*paths, path, max_seq_len=64, backend="torch", dtype="float32", **options))
    return Engine.load(path, threads=1)


@pytest.mark.parametrize(
    ("architecture", "draft"),
    [("llama", "eagle3"), ("mistral", "dspark"), ("gemma2", "dflash"), ("gpt_oss", "jetspec")],
)
def test_the_step_proposes_and_emits_the_same(pairs, tmp_path, architecture, draft):
    reference = pairs(architecture, draft=tiny.FAMILIES[draft])
    engine = torch_engine(reference, tmp_path / "engine")
    for prompt in PROMPTS:
        (expected,), (found,) = (
            e.generate([prompt], 24, prefill_chunk=5) for e in (reference.engine, engine)
        )
        assert found.token_ids == expected.token_ids
        assert found.proposals == expected.proposals
        assert found.acceptance_lengths == expected.acceptance_lengths
    expected = [eager_greedy(reference.target, p, 24) for p in PROMPTS]
    for speculation in (True, False):
        found = engine.generate(PROMPTS, 24, speculation=speculation)
        assert [r.token_ids for r in found] == expected


def test_the_triton_kernel_inside_a_step(pairs, tmp_path, monkeypatch):
    """What a CUDA device runs, in Triton's interpreter: the same tokens and proposals."""
    kernel = pytest.importorskip("speccompile.plugins.block_attention.kernel")
    reference = pairs("mistral", draft=tiny.FAMILIES["causal-depth"])
    engine = torch_engine(reference, tmp_path / "engine")
    calls = []

    def interpreted(*arguments, **options):
        calls.append(options)
        return kernel.append_and_attend(*arguments, **options)

    monkeypatch.setattr(op, "_on_cpu", interpreted)
    (expected,), (found,) = (e.generate([PROMPTS[1]], 8) for e in (reference.engine, engine))
    assert found.token_ids == expected.token_ids and found.proposals == expected.proposals
    assert {c["causal"] for c in calls} == {True} and {c["window"] for c in calls} == {12, None}


def test_weights_are_stored_once_and_read_by_both_graphs(pairs, tmp_path):
    reference = pairs(target={"vocab_size": 4096}, draft={"family": "dflash"})
    engine = torch_engine(reference, tmp_path / "engine")
    sizes = engine.directory.report["bytes"]
    assert sizes["rank0.safetensors"] < reference.report["bytes"]["rank0.weights"] * 1.1
    assert sizes["rank0.pt2"] + sizes["rank0.plain.pt2"] < 2e6
    said = speccompile("inspect", tmp_path / "engine").stdout
    assert "append_and_attend" in said and "rank0.plain.pt2" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("draft", ["dflash", "causal-depth", "eagle3"])
def test_on_cuda(pairs, tmp_path, draft):
    """Kernel and CUDA graph on the device: the CPU's tokens and proposals."""
    reference = pairs(draft=tiny.FAMILIES[draft])
    engine = torch_engine(reference, tmp_path / "engine")
    assert engine.session(1).device.type == "cuda"
    for prompt in PROMPTS:
        (expected,), (found,) = (e.generate([prompt], 24) for e in (reference.engine, engine))
        assert found.token_ids == expected.token_ids and found.proposals == expected.proposals
