"""Lengths, chunks, batches, widths: whatever the road, the tokens are those of eager decoding."""

import pytest
import tiny
from builder import eager_greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.export.errors import UserError
from speccompile.runtime import SamplingParams

MAX_SEQ_LEN = 64
token = st.integers(0, tiny.SIZES["vocab_size"] - 1)
prompts = st.lists(token, min_size=1, max_size=MAX_SEQ_LEN)
FAMILIES = tuple(tiny.FAMILIES)
# A vocabulary of eleven tokens makes random proposals hit, so that every acceptance count occurs.
SMALL = {"vocab_size": 11}


def at_width(family: str, width: int) -> dict:
    draft = tiny.FAMILIES[family]
    return (
        {"draft": draft | {"block_width": width}}
        if family == "xpress"
        else {"draft": draft, "block_width": width}
    )


quick = settings(max_examples=10, deadline=None)


@pytest.mark.parametrize("family", FAMILIES)
@quick
@given(prompt=prompts, budget=st.integers(1, 40))
def test_any_prompt_length_up_to_the_capacity(pairs, family, prompt, budget):
    pair = pairs(draft=tiny.FAMILIES[family])
    result = pair.engine.generate([prompt], budget)[0]
    expected = min(budget, MAX_SEQ_LEN + 1 - len(prompt))
    assert result.token_ids == eager_greedy(pair.target, prompt, expected)
    assert result.finish_reason == ("length" if expected == budget else "capacity")


@pytest.mark.parametrize("family", FAMILIES)
@quick
@given(prompt=prompts, chunk=st.integers(1, 9))
def test_chunked_prefill_equals_one_shot(pairs, family, prompt, chunk):
    engine = pairs(draft=tiny.FAMILIES[family]).engine
    whole = engine.generate([prompt], 12, prefill_chunk=MAX_SEQ_LEN)[0]
    chunked = engine.generate([prompt], 12, prefill_chunk=chunk)[0]
    assert chunked.token_ids == whole.token_ids
    assert chunked.proposals == whole.proposals  # the draft's context, too, is the same


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(batch=st.lists(prompts, min_size=2, max_size=8), chunk=st.integers(2, 20))
def test_a_ragged_batch_equals_each_prompt_alone(pairs, family, batch, chunk):
    engine = pairs(target=SMALL, draft=tiny.FAMILIES[family]).engine
    batch = [[t % 11 for t in prompt] for prompt in batch]
    together = engine.generate(batch, 16, prefill_chunk=chunk)
    for prompt, result in zip(batch, together, strict=True):
        alone = engine.generate([prompt], 16)[0]
        assert result.token_ids == alone.token_ids
        assert result.proposals == alone.proposals
        assert result.acceptance_lengths == alone.acceptance_lengths


@pytest.mark.parametrize(
    ("family", "width"),
    [("causal-depth", w) for w in (2, 3, 5, 8, 16)]
    + [(f, w) for f in FAMILIES if f != "causal-depth" for w in (2, 9)],
)
def test_block_widths(pairs, family, width):
    """Other widths than the one a draft was trained for (which is 4); xPress mixes exactly its own rows."""
    pair = pairs(target=SMALL, **at_width(family, width))
    for prompt in ([3], [1, 2, 3, 4, 5, 6, 7], [9] * 50):
        result = pair.engine.generate([prompt], 30)[0]
        assert result.token_ids == eager_greedy(pair.target, prompt, len(result.token_ids))
        assert all(len(p) == width - 1 for p in result.proposals)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_acceptance_count_occurs_and_is_right(pairs, family):
    """A block of two proposals: none, one or both accepted, all seen, all giving the target's text."""
    pair = pairs(target={"vocab_size": 4}, **at_width(family, 3))
    counts = set()
    for seed in range(40):
        prompt = [seed % 4, seed // 4 % 4, seed // 16 % 4]
        result = pair.engine.generate([prompt], 20)[0]
        assert result.token_ids == eager_greedy(pair.target, prompt, 20)
        counts |= set(result.acceptance_lengths[:-1])  # the last step may be cut by the budget
    assert counts == {1, 2, 3}


def test_acceptance_lengths_account_for_every_token(pairs):
    result = pairs(target=SMALL).engine.generate([[1, 2, 3]], 25)[0]
    assert 1 + sum(result.acceptance_lengths) == len(
        result.token_ids
    )  # the first token comes from the prefill


@pytest.mark.parametrize("offset", range(8))
def test_a_stop_token_inside_a_block_ends_the_text_with_it(pairs, offset):
    engine = pairs(target={"vocab_size": 4}, draft={"family": "dflash"}, block_width=4).engine
    free = engine.generate([[1, 2]], 24)[0].token_ids
    stop = free[offset]
    result = engine.generate([[1, 2]], SamplingParams(24, stop_token_ids=(stop,)))[0]
    assert result.token_ids == free[: free.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_a_stop_token_at_the_budget_is_a_stop(pairs):
    engine = pairs(target=SMALL).engine
    first = engine.generate([[1, 2, 3]], 1)[0].token_ids[0]
    params = SamplingParams(1, stop_token_ids=(first,))
    assert engine.generate([[1, 2, 3]], params)[0].finish_reason == "stop"


def test_text_that_holds_the_mask_token_is_not_cut(pairs):
    """z-lab/dflash#73: tokens equal to the mask id belong to the text like any other."""
    pair = pairs(target={"vocab_size": 4}, draft={"family": "dflash", "mask_token_id": 1}, block_width=4)
    texts = [pair.engine.generate([[a, b]], 24)[0].token_ids for a in range(4) for b in range(4)]
    assert any(1 in text for text in texts)
    assert texts == [eager_greedy(pair.target, [a, b], 24) for a in range(4) for b in range(4)]


def test_sequences_that_end_early_do_not_disturb_the_others(pairs):
    engine = pairs(target=SMALL).engine
    batch = [[1], [2] * 60, [3] * 64, [4] * 10]
    together = engine.generate(batch, 30)
    assert [r.finish_reason for r in together] == ["length", "capacity", "capacity", "length"]
    assert [r.token_ids for r in together] == [engine.generate([p], 30)[0].token_ids for p in batch]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "has 0 tokens"), ([1] * (MAX_SEQ_LEN + 1), "has 65 tokens"), ([61], "outside the vocabulary"), ([-1], "outside the vocabulary")],
)  # fmt: skip
def test_prompts_that_cannot_be(pairs, prompt, words):
    with pytest.raises(UserError, match=words):
        pairs(draft={"family": "dflash"}).engine.generate([prompt], 4)


def test_a_batch_beyond_the_build_is_refused(pairs):
    with pytest.raises(UserError, match="max-batch-size 8"):
        pairs(draft={"family": "dflash"}).engine.session(9)


def test_half_precision(pairs):
    """float16 rounds differently in other kernels: the outcome is checked by `verify`, near ties and all."""
    from speccompile.compiler.verify import verify

    pair = pairs(draft={"family": "causal-depth"}, dtype="float16")
    outcome = verify(pair.engine, pair.target, [[5, 7, 9], [1], [3] * 20], 16)
    assert outcome.tokens == 48
    assert not outcome.failures
