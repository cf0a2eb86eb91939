"""Sampling: the distribution is Transformers' own, drawn exactly, and speculation changes no token of it."""

import json

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import speccompile
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speccompile.compiler.sampling import MOST_TOP_K, sample
from speccompile.export.errors import UserError
from speccompile.runtime import SamplingParams, params

DRAFT = tiny.FAMILIES["causal-depth"]
SMALL = {"vocab_size": 16}


def transformers_probabilities(logits, temperature, top_k, top_p, min_p):
    """[V] by the processors that `generate` would apply, in its order."""
    scores = TemperatureLogitsWarper(float(temperature))(None, logits[None].float())
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p > 0 else scores
    return scores.softmax(-1)[0].double().numpy()


def numpy_choice(probabilities, uniform):
    """The rule, plainly: the first token whose cumulative probability exceeds the uniform number."""
    return int(np.searchsorted(np.cumsum(probabilities) / probabilities.sum(), uniform, side="right"))


laws = st.tuples(
    st.sampled_from([0.3, 0.7, 1.0, 1.5]), st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(laws, st.sampled_from([7, 256, 300, 1500]), st.integers(0, 10**6), st.floats(0.5, 6))
def test_draws_follow_the_rule(law, vocabulary, seed, spread):
    """Each token drawn is the plain rule's at Transformers' probabilities, but where rounding decides between neighbours."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 1, vocabulary, generator=generator) * spread
    count = 64
    uniforms = torch.rand(1, count, generator=generator)
    temperature, top_k, top_p, min_p = law
    numbers = (torch.tensor([x]) for x in (temperature, top_k, top_p, min_p))
    found = sample(logits.expand(1, count, -1), *numbers, uniforms)[0].numpy()
    probabilities = transformers_probabilities(logits[0, 0], *law)
    upto = np.cumsum(probabilities)
    for token, uniform in zip(found, uniforms[0].double().numpy()):
        wanted = numpy_choice(probabilities, uniform)
        if token != wanted:
            low, high = sorted((int(token), wanted))
            assert probabilities[token] > 0
            assert np.abs(upto[low:high] - uniform).max() < 1e-5


def test_uniform_numbers_at_their_ends_choose_no_impossible_token():
    """stitch#172: u = 0 must not choose a token without probability, nor must the largest u below 1."""
    logits = torch.tensor([-300.0, -300.0, 1.0, 0.5, -300.0]).repeat(1, 2, 1)
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    for top_k in (2, 0):
        numbers = (torch.tensor([x]) for x in (1.0, top_k, 1.0, 0.0))
        assert sample(logits, *numbers, torch.tensor([[0.0, largest]])).tolist() == [[2, 3]]


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([0.0, 1.0, 0.0])
    rest = torch.tensor([0, 2, 0]), torch.tensor([1.0, 1.0, 0.5]), torch.zeros(3)
    found = sample(logits, temperature, *rest, torch.full((3, 2), 0.999))
    assert torch.equal(found[[0, 2]], logits[[0, 2]].argmax(-1))
    assert all(token in row.topk(2).indices for token, row in zip(found[1], logits[1]))


@pytest.fixture(scope="module")
def engine(pairs):
    return pairs(target=SMALL, draft=DRAFT, sampling=True, max_batch_size=16).engine


LAWS = [dict(temperature=20.0), dict(temperature=12.0, top_k=5, top_p=0.9), dict(temperature=15.0, min_p=0.1)]
"""Hot, since the tiny target's logits lie far apart."""


@pytest.mark.parametrize("law", LAWS)
def test_the_first_and_second_tokens_are_distributed_as_transformers_would(pairs, engine, law):
    """Chi-square over many seeds: the first token comes from prefill, the second from a verified block."""
    target = pairs(target=SMALL, draft=DRAFT, sampling=True, max_batch_size=16).target
    prompt, draws = [1, 2, 3], 4000
    requests = [SamplingParams(2, ignore_eos=True, seed=seed, **law) for seed in range(draws)]
    drawn = np.array([r.token_ids for r in engine.generate([prompt] * draws, requests)])
    law = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | law
    first = transformers_probabilities(target(torch.tensor([prompt])).logits[0, -1], **law)
    second = np.zeros(16)
    for token in np.flatnonzero(first):
        after = target(torch.tensor([[*prompt, token]])).logits[0, -1]
        second += first[token] * transformers_probabilities(after, **law)
    for column, expected in ((0, first), (1, second)):
        counts = np.bincount(drawn[:, column], minlength=16)
        assert not counts[expected == 0].any()
        likely = expected * draws >= 5
        kept = np.append(expected[likely], expected[~likely].sum()) * draws
        seen = np.append(counts[likely], counts[~likely].sum())
        kept, seen = kept[kept > 0], seen[kept > 0]
        statistic = ((seen - kept) ** 2 / kept).sum()
        degrees = max(len(kept) - 1, 1)
        assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 5  # far beyond the 99.99th percentile


@pytest.mark.parametrize("family", ["dflash", "causal-depth", "dspark", "eagle3", "dflash2"])
def test_speculation_changes_no_sampled_token(pairs, family):
    """The same seed gives plain decoding's text, alone and in a batch, with proposals accepted on the way."""
    engine = pairs(target=SMALL, draft=tiny.FAMILIES[family], sampling=True).engine
    prompts = [[1, 2, 3], [5] * 9, [7]]
    each = [SamplingParams(20, ignore_eos=True, seed=i, **law) for i, law in enumerate(LAWS)]
    plain = engine.generate(prompts, each, speculation=False)
    together = engine.generate(prompts, each)
    assert [r.token_ids for r in together] == [r.token_ids for r in plain]
    alone = [engine.generate([p], e, prefill_chunk=2)[0] for p, e in zip(prompts, each)]
    assert [r.token_ids for r in alone] == [r.token_ids for r in plain]
    assert any(n > 1 for r in together for n in r.acceptance_lengths)


def test_onnx_runtime_and_torch_draw_the_same(pairs, engine):
    torch_engine = pairs(
        target=SMALL, draft=DRAFT, sampling=True, max_batch_size=16, backend="torch", dtype="float32"
    ).engine
    each = [SamplingParams(16, seed=i, temperature=20.0, top_p=0.95) for i in range(6)]
    found, expected = ([r.token_ids for r in e.generate([[1, 2]] * 6, each)] for e in (torch_engine, engine))
    assert found == expected and len({tuple(t) for t in expected}) > 3


def test_a_greedy_request_in_a_sampling_engine_is_greedy(pairs, engine):
    greedy = pairs(target=SMALL, draft=DRAFT).engine.generate([[1, 2, 3]], 20)[0]
    mixed = engine.generate(
        [[1, 2, 3], [4]], [SamplingParams(20), SamplingParams(20, temperature=1.0, seed=3)]
    )
    assert mixed[0].token_ids == greedy.token_ids and mixed[0].proposals == greedy.proposals
    assert mixed[0].seed is None and mixed[1].seed == 3


def test_a_seed_is_drawn_and_told(engine):
    first, second = engine.generate([[1, 2]] * 2, SamplingParams(24, temperature=20.0))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    again = engine.generate([[1, 2]], SamplingParams(24, temperature=20.0, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


def test_uniform_numbers_do_not_depend_on_how_they_are_asked_for():
    whole = params.Uniforms(5).window(0, 700)
    numbers = params.Uniforms(5)
    assert np.array_equal(np.concatenate([numbers.window(s, 7) for s in range(0, 700, 7)]), whole)
    assert (
        whole.dtype == np.float32 and 0 <= whole.min() and whole.max() < 1 and abs(whole.mean() - 0.5) < 0.05
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(temperature=-1.0), "temperature is -1.0; it must be 0"), (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=257), "top_k is 257; it must be from 0 .* to 256"), (dict(top_p=0.0), "top_p is 0.0; it must be above 0"),
        (dict(min_p=1.5), "min_p is 1.5"), (dict(max_new_tokens=0), "max_new_tokens is 0"), (dict(stop=("",)), "stop is"),
    ],
)  # fmt: skip
def test_parameters_out_of_range(options, words):
    with pytest.raises(UserError, match=words):
        SamplingParams(**options)
    assert params.MOST_TOP_K == MOST_TOP_K


def test_a_greedy_engine_refuses_to_sample(pairs, tmp_path):
    pair = pairs(target=SMALL, draft=DRAFT)
    with pytest.raises(UserError, match="decodes greedily only; build it again with --sampling"):
        pair.engine.generate([[1]], SamplingParams(4, temperature=0.5))
    options = "--target", pair.target_path, "--draft", pair.draft_path, "--out", tmp_path / "e"
    said = speccompile("build", *options, "--sampling", "--backend", "tensorrt-rtx", code=2).stderr
    assert "--sampling is not something --backend tensorrt-rtx has yet" in " ".join(said.split())


def test_the_command_samples(pairs):
    path = pairs(target=SMALL, draft=DRAFT, sampling=True, max_batch_size=16).engine.directory.path
    options = "--prompt-ids", "1,2", "--max-new-tokens", 12, "--temperature", "20", "--top-p", "0.9", "--json"
    one, same, plain = (
        json.loads(speccompile("run", path, *options, "--seed", "4", *more).stdout)["token_ids"]
        for more in ((), (), ("--no-speculation",))
    )
    assert one == same == plain


@pytest.mark.parametrize("temperature", [0.0, 20.0])
def test_log_probabilities_are_the_targets(pairs, temperature):
    pair = pairs(target=SMALL, draft=DRAFT, sampling=True, max_batch_size=16)
    asked = SamplingParams(12, temperature=temperature, seed=1, logprobs=4, ignore_eos=True)
    for speculation in (True, False):
        for result in pair.engine.generate([[1, 2, 3], [7] * 9], asked, speculation):
            with torch.no_grad():
                logits = pair.target(torch.tensor([result.prompt + result.token_ids])).logits[0].double()
            expected = logits.log_softmax(-1)[len(result.prompt) - 1 : -1]
            assert [e.token for e in result.logprobs] == result.token_ids
            for row, entry in zip(expected, result.logprobs, strict=True):
                assert entry.logprob == pytest.approx(row[entry.token].item(), abs=2e-3)
                assert [t for t, _ in entry.top] == row.topk(4).indices.tolist()
    with pytest.raises(UserError, match="does not compute them; build it again with --sampling"):
        pairs(target=SMALL, draft=DRAFT).engine.generate([[1]], SamplingParams(2, logprobs=0))
