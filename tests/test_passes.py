"""Every pass: the graph it makes, and that the graph still computes the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speccompile.compiler.stages import flat_copy
from speccompile.passes.drop_noops import drop_noops
from speccompile.passes.fuse_projections import fuse_projections
from speccompile.passes.fuse_rms_norm import fuse_rms_norm
from speccompile.passes.gather_verified_rows import gather_verified_rows
from speccompile.passes.lower_group_query_attention import lower_group_query_attention
from speccompile.passes.program import Program
from speccompile.passes.promote_types import promote_types
from speccompile.passes.share_parameters import share_parameters
from speccompile.passes.tap_hidden_states import tap_hidden_states
from speccompile.plugins.block_attention import block_attention
from speccompile.plugins.kv_append import kv_append

aten = torch.ops.aten


def program(module, example, inputs=None, outputs=None, aliases=None):
    """Trace with a dynamic batch (3 in the example) into a Program."""
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
    with torch.no_grad():
        exported = torch.export.export(module.eval(), example, dynamic_shapes=shapes, strict=False)
    graph_module = flat_copy(exported.module(check_guards=False))
    count = len(next(n for n in graph_module.graph.nodes if n.op == "output").args[0])
    return Program(
        graph_module,
        inputs or [f"in{i}" for i in range(len(example))],
        outputs or [f"out{i}" for i in range(count)],
        aliases or {},
    )


def calls(p, target):
    return [n for n in p.graph.nodes if n.op == "call_function" and n.target == target]


def assert_same(p, before, example):
    with torch.no_grad():
        after = p.run(*example)
    for a, b in zip(after, before):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_tap_hidden_states_keeps_the_taps_in_the_drafts_order():
    class Target(nn.Module):
        def forward(self, x):
            hidden = [x + i for i in range(5)]
            return (x * 9, *hidden, x * 7)

    x = torch.randn(3, 4, 2)
    p = program(Target(), (x,), outputs=["logits", *[f"hidden.{i}" for i in range(5)], "cache"])
    assert tap_hidden_states(p, (3, 1)) == 2
    assert p.outputs == ["logits", "features", "cache"]
    assert_same(p, [x * 9, torch.cat([x + 3, x + 1], -1), x * 7], (x,))


def test_tap_hidden_states_without_taps_leaves_none():
    class Target(nn.Module):
        def forward(self, x):
            return x * 9, x, x + 1, x * 7

    x = torch.randn(3, 4)
    p = program(Target(), (x,), outputs=["logits", "hidden.0", "hidden.1", "cache"])
    assert tap_hidden_states(p, ()) == 0
    assert p.outputs == ["logits", "cache"]
    assert len(p.run(x)) == 2


def test_drop_noops():
    class Casts(nn.Module):
        def forward(self, x):
            return (F.dropout(x.to(torch.float32)[:, 0:], training=False).to(torch.float64) * 2,)

    x = torch.randn(3, 4)
    p = program(Casts(), (x,))
    before = p.run(x)
    assert drop_noops(p) >= 3
    assert not calls(p, aten.slice.Tensor) and not calls(p, aten.dropout.default)
    assert len(calls(p, aten.to.dtype)) == 1  # the one that changes the type
    assert_same(p, before, (x,))


def test_promote_types():
    class Mixed(nn.Module):
        def forward(self, x, n):
            return x * n, n < x

    example = torch.randn(3, 4), torch.randint(-2, 3, (3, 4))
    p = program(Mixed(), example)
    before = p.run(*example)
    assert promote_types(p) == 2
    for node in calls(p, aten.mul.Tensor) + calls(p, aten.lt.Tensor):
        assert len({x.meta["val"].dtype for x in node.args}) == 1
    assert_same(p, before, example)


class Head(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.lm_head, self.wrap = nn.Linear(6, 50, bias=False), wrap

    def forward(self, hidden, rows):
        logits = self.wrap(self.lm_head(hidden))
        return (logits.gather(1, rows[:, :, None].expand(-1, -1, 50)).argmax(-1),)


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: torch.tanh(x / 3.0) * 3.0, lambda x: x * 0.5, lambda x: x.double() / 8.0]
)
def test_gather_verified_rows_moves_before_the_head(wrap):
    example = torch.randn(3, 9, 6), torch.tensor([[0, 1], [7, 8], [8, 8]])
    p = program(Head(wrap), example)
    before = p.run(*example)
    drop_noops(p)
    assert gather_verified_rows(p) == 1
    (gather,), (linear,) = calls(p, aten.gather.default), calls(p, aten.linear.default)
    assert gather.meta["val"].shape[1:] == (2, 6)  # K rows of hidden states, not S rows of logits
    assert gather in linear.all_input_nodes
    assert linear.meta["val"].shape[1:] == (2, 50)
    assert_same(p, before, example)


def test_gather_stays_where_logits_are_used_whole():
    class Both(Head):
        def forward(self, hidden, rows):
            logits = self.lm_head(hidden)
            return logits.gather(1, rows[:, :, None].expand(-1, -1, 50)), logits.sum(-1)

    assert (
        gather_verified_rows(program(Both(None), (torch.randn(3, 9, 6), torch.tensor([[0], [1], [2]])))) == 0
    )


def test_share_parameters_keeps_one_copy_of_equal_tensors():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 40, bias=False) for _ in range(3))
            self.b.weight = nn.Parameter(self.a.weight.detach().clone())

        def forward(self, x):
            return self.a(x), self.b(x), self.c(x)

    x = torch.randn(3, 8)
    p = program(Tied(), (x,))
    before = p.run(x)
    assert share_parameters(p) == 1
    assert len({n.target for n in p.graph.nodes if n.op == "get_attr"}) == 2
    assert_same(p, before, (x,))


class Projections(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(8, 16, bias=bias),
            nn.Linear(8, 4, bias=bias),
            nn.Linear(8, 4, bias=bias),
        )
        self.other = nn.Linear(8, 4, bias=bias)

    def forward(self, x, y):
        return self.q(x), self.k(x), self.v(x), self.other(y)


@pytest.mark.parametrize("bias", [False, True])
def test_fuse_projections_makes_one_product_of_the_same_rows(bias):
    example = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    p = program(Projections(bias), example)
    before = p.run(*example)
    assert fuse_projections(p) == 1
    assert sorted(n.meta["val"].shape[-1] for n in calls(p, aten.linear.default)) == [4, 24]
    assert len(calls(p, aten.slice.Tensor)) == 3
    assert_same(p, before, example)


def test_fuse_projections_leaves_a_tied_head_alone():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.other = nn.Parameter(torch.randn(30, 8)), nn.Linear(8, 4, bias=False)

        def forward(self, tokens):
            x = F.embedding(tokens, self.table)
            return F.linear(x, self.table), self.other(x)

    assert fuse_projections(program(Tied(), (torch.randint(0, 30, (3, 5)),))) == 0


class Norm(nn.Module):
    """RMSNorm as Transformers writes it: Llama's weight, Gemma's 1 + weight, and the casts of half precision."""

    def __init__(self, offset, dtype):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.randn(8).to(dtype)), offset

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.offset:
            return ((y * (1.0 + self.weight.float())).to(x.dtype),)
        return (self.weight * y.to(x.dtype),)


@pytest.mark.parametrize("offset", [False, True])
def test_fuse_rms_norm(offset):
    example = (torch.randn(3, 5, 8),)
    p = program(Norm(offset, torch.float32), example)
    before = p.run(*example)
    drop_noops(p)
    assert fuse_rms_norm(p) == 1
    assert len(calls(p, aten.rms_norm.default)) == 1 and not calls(p, aten.rsqrt.default)
    assert_same(p, before, example)


def test_fuse_rms_norm_leaves_half_precision_weights_alone():
    p = program(Norm(False, torch.float16), (torch.randn(3, 5, 8, dtype=torch.float16),))
    drop_noops(p)
    assert fuse_rms_norm(p) == 0


class Attention(nn.Module):
    """Two appends to one cache, then attention: the draft's context rows and its block."""

    def __init__(self, causal, window=None, context=True):
        super().__init__()
        self.causal, self.window, self.context = causal, window, context

    def forward(self, q, k, v, ck, cv, at, new_at, key_cache, value_cache):
        if self.context:
            key_cache, value_cache = kv_append(key_cache, ck, at), kv_append(value_cache, cv, at)
        key_cache, value_cache = kv_append(key_cache, k, new_at), kv_append(value_cache, v, new_at)
        out = block_attention(
            q, key_cache, value_cache, new_at, causal=self.causal, scale=0.3, window=self.window
        )
        return out, key_cache, value_cache


def attention_program(module):
    torch.manual_seed(0)
    example = (
        torch.randn(3, 4, 5, 8), *torch.randn(2, 3, 2, 5, 8), *torch.randn(2, 3, 2, 4, 8),
        torch.tensor([0, 3, 9]), torch.tensor([2, 7, 9]), *torch.randn(2, 3, 2, 20, 8),
    )  # fmt: skip
    names = ["q", "k", "v", "ck", "cv", "at", "new_at", "key", "value"]
    return program(
        module, example, names, ["out", "key.out", "value.out"], {"key.out": "key", "value.out": "value"}
    ), example


GQA = torch.ops.speccompile.group_query_attention.default


@pytest.mark.parametrize("window", [None, 3])
def test_causal_attention_takes_append_and_attention_in_one_node(window):
    p, example = attention_program(Attention(True, window))
    before = p.run(*example)
    assert lower_group_query_attention(p) == 1
    (node,) = calls(p, GQA)
    assert (node.kwargs["num_heads"], node.kwargs["kv_num_heads"], node.kwargs["window"]) == (4, 2, window)
    assert (
        len(calls(p, torch.ops.speccompile.kv_append.default)) == 2
    )  # the context's; the block's are in the node
    assert p.aliases == {"key.out": "key", "value.out": "value", "key.1": "key", "value.1": "value"}
    assert_same(p, before, example)


def test_bidirectional_rows_become_heads_of_one_row():
    p, example = attention_program(Attention(False))
    before = p.run(*example)
    assert lower_group_query_attention(p) == 1
    (node,) = calls(p, GQA)
    assert node.kwargs["num_heads"] == 4 * 5
    assert node.args[0].meta["val"].shape[1:] == (1, 4 * 5 * 8)
    assert sorted(p.aliases) == ["key.1", "key.2", "key.out", "value.1", "value.2", "value.out"]
    assert_same(p, before, example)


def test_a_windowed_bidirectional_block_keeps_the_portable_form():
    p, example = attention_program(Attention(False, window=3))
    before = p.run(*example)
    assert lower_group_query_attention(p) == 0
    assert not calls(p, GQA)
    assert sorted(p.aliases) == ["key.1", "key.out", "value.1", "value.out"]
    assert_same(p, before, example)
