"""Our parts equal SGLang's own plain-PyTorch ones.

SGLang's draft models as a whole are written against its runtime (paged attention, parallel linears, Triton and CUDA
kernels) and do not import on a CPU. Their heads, convolution and rollout are plain PyTorch: each is taken from the
wheel's source by name and run beside ours.
"""

import ast
import importlib.util
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Optional

import pytest
import torch
from references import randomise
from torch import nn
from torch.nn import functional as F

from speccompile.compiler.drafts.block import DepthConvolution
from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.heads import CandidateSelector, ConfidenceHead, DominoHead, MarkovHead

SPEC = importlib.util.find_spec("sglang")
if SPEC is None:
    pytest.skip("sglang is not installed: see tests/run.sh", allow_module_level=True)
SGLANG = Path(SPEC.submodule_search_locations[0])
BATCH, PROPOSALS, VOCABULARY = 2, 6, 40
SEEDS = range(20)


def definitions(file: str, *names: str) -> list:
    """Top-level classes and functions of a file of SGLang's, without decorators (they compile for a GPU)."""
    tree = ast.parse((SGLANG / file).read_text())
    found = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(found) == len(names)
    for node in found:
        node.decorator_list = []
    known = {"torch": torch, "nn": nn, "F": F, "ABC": ABC, "abstractmethod": abstractmethod}
    known |= {"Optional": Optional, "Tuple": tuple, "VocabShard": object, "_flashinfer_top_k": True}
    exec(compile(ast.Module(found, []), str(SGLANG / file), "exec"), known)
    return [known[name] for name in names]


class Lent:
    """What a head asks of its draft: the target's tables."""

    def __init__(self, hidden: int):
        self.embedding, self.head = torch.randn(VOCABULARY, hidden), torch.randn(VOCABULARY, hidden)

    def embed(self, tokens):
        return F.embedding(tokens, self.embedding)

    def logits(self, hidden):
        return F.linear(hidden, self.head)

    def token_ids(self, index):
        return index


def setting(seed: int, **knobs) -> tuple[DraftConfig, Lent, torch.Tensor, torch.Tensor]:
    """A config, the lent tables, hidden states [B, P, H] and anchors [B]."""
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, vocab_size=VOCABULARY, num_target_layers=2, tapped_hidden_states=(1,),
        block_width=PROPOSALS + 1, causal=(False,), windows=(None,), rope_parameters={}, max_position_embeddings=64,
        **knobs,
    )  # fmt: skip
    return config, Lent(16), torch.randn(BATCH, PROPOSALS, 16), torch.randint(VOCABULARY, (BATCH,))


@pytest.mark.parametrize("kind", ["markov", "markov_gated", "markov_rnn"])
@pytest.mark.parametrize("with_previous", [True, False])
@torch.no_grad()
def test_dspark_heads(kind, with_previous):
    names = ("BaseDSparkMarkovHead", "VanillaMarkov", "GatedMarkovHead", "RNNHead", "DSparkConfidenceHead")
    _, vanilla, gated, rnn, confidence_class = definitions("srt/models/dspark.py", *names)
    theirs_class = {"markov": vanilla, "markov_gated": gated, "markov_rnn": rnn}[kind]
    proposed = set()
    for seed in SEEDS:
        confidence = "hidden_and_previous" if with_previous else "hidden"
        config, lent, hidden, anchor = setting(seed, head=kind, head_rank=8, confidence=confidence)
        sizes = {"vocab_size": VOCABULARY, "markov_rank": 8}
        theirs = theirs_class(**sizes, **({} if kind == "markov" else {"hidden_size": 16}))
        randomise(theirs, seed, 1.0)
        ours = MarkovHead(config)
        ours.load_state_dict(theirs.state_dict())
        prev, state, expected = anchor, theirs.init_state(hidden[:, 0]), []
        for row in range(PROPOSALS):
            bias, state = theirs.step_bias(prev, hidden_states=hidden[:, row], state=state)
            prev = (lent.logits(hidden[:, row]) + bias).argmax(-1)
            expected.append(prev)
        expected = torch.stack(expected, 1)
        assert torch.equal(ours.propose(lent, hidden, anchor, anchor), expected)
        proposed |= set(expected.flatten().tolist())

        their_confidence = confidence_class(hidden_size=16, markov_rank=8, with_markov=with_previous)
        our_confidence = ConfidenceHead(config)
        our_confidence.load_state_dict(their_confidence.state_dict())
        previous = torch.cat([anchor[:, None], expected[:, :-1]], 1)
        embedded = theirs.get_prev_embeddings(previous)
        features = torch.cat([hidden, embedded], -1) if with_previous else hidden
        wanted = their_confidence.apply_sts(their_confidence(hidden, embedded))
        torch.testing.assert_close(our_confidence(features), wanted)
    assert len(proposed) > VOCABULARY / 2


@pytest.mark.parametrize("candidates", [2, 8])
@torch.no_grad()
def test_dflash2_selector(candidates):
    theirs_class, _, _ = definitions(
        "srt/models/dflash.py", "CandidateSelector", "_score_edges", "_follow_maps"
    )
    differs = 0
    for seed in SEEDS:
        config, lent, hidden, anchor = setting(seed, head="selector", head_rank=8, head_candidates=candidates)
        theirs = theirs_class(hidden_size=16, vocab_size=VOCABULARY, state_rank=8, top_k=candidates)
        randomise(theirs, seed, 1.0)
        ours = CandidateSelector(config)
        ours.load_state_dict(theirs.state_dict())
        unary, ids = lent.logits(hidden).topk(candidates, -1)
        scores = theirs.build_lattice(
            candidate_ids=ids, unary_logits=unary, hidden_states=hidden, anchor_token_ids=anchor
        )
        expected, _ = theirs.sample_path(
            candidate_ids=ids, scores=scores, uniforms=torch.rand(BATCH, PROPOSALS), temperatures=torch.ones(BATCH),
            greedy_mask=torch.ones(BATCH, dtype=torch.bool),
        )  # fmt: skip
        assert torch.equal(ours.propose(lent, hidden, anchor, anchor), expected)
        differs += int((expected != ids[:, :, 0]).sum())
    assert differs > 0  # the selector did decide


@pytest.mark.parametrize("rows", [5, 8])
@torch.no_grad()
def test_dflash2_convolution(rows):
    theirs_class, _ = definitions("srt/models/dflash.py", "DFlashGroupedConv", "_grouped_conv")
    for seed in SEEDS:
        config, _, _, _ = setting(seed, conv_kernel_size=1 + seed % 4, conv_group_size=4)
        theirs = theirs_class(16, rows, config.conv_kernel_size, 4)
        randomise(theirs, seed, 1.0)
        ours = DepthConvolution(config)
        ours.load_state_dict(theirs.state_dict())
        u = torch.randn(BATCH, rows, 16)
        before, coefficients = theirs.prepare(u.flatten(0, 1))  # SGLang's rows of all blocks lie in one row
        after = theirs.finish(torch.tanh(before), coefficients)
        c = ours.coefficients(u)
        y = ours.convolve(u, c[:, :, 0])
        torch.testing.assert_close(y, before.view_as(u))
        torch.testing.assert_close(ours.convolve(torch.tanh(y), c[:, :, 1]), after.view_as(u))


@pytest.mark.parametrize("shift_label", [True, False])
@torch.no_grad()
def test_domino_rollout(shift_label):
    rollout, _ = definitions("srt/speculative/domino_utils.py", "domino_greedy_rollout", "_domino_gru_cell")
    proposed = set()
    for seed in SEEDS:
        config, lent, hidden, anchor = setting(
            seed, head="gru", head_rank=8, head_state_size=12, head_prefix=1
        )
        gru = nn.GRU(16, 12, bias=False, batch_first=True)
        projection = nn.Sequential(
            nn.Linear(28, 8, bias=False), nn.SiLU(), nn.Linear(8, VOCABULARY, bias=False)
        )
        randomise(gru, seed, 1.0)
        randomise(projection, seed + 1, 1.0)
        ours = DominoHead(config)
        ours.prefix_gru.load_state_dict(gru.state_dict())
        ours.embed_proj.load_state_dict(projection.state_dict())
        unused = torch.randn(BATCH, 1, 16)
        block = torch.cat([hidden, unused] if shift_label else [unused, hidden], 1)
        expected = rollout(
            draft_hidden=block, bonus_tokens=anchor, target_embedding=nn.Embedding.from_pretrained(lent.embedding),
            lm_head_weight=lent.head, prefix_gru=gru, embed_proj=projection, vocab_size=VOCABULARY,
            shift_label=shift_label, candidate_pool_size=0, in_cuda_graph=False,
        )  # fmt: skip
        assert torch.equal(ours.propose(lent, hidden, anchor, anchor), expected)
        proposed |= set(expected.flatten().tolist())
    assert len(proposed) > VOCABULARY / 2
