"""Continuous batching: what a request gets does not depend on who else is there."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from builder import eager_greedy
from hypothesis import given
from hypothesis import strategies as st

from speccompile.export.errors import UserError
from speccompile.runtime import AsyncEngine, SamplingParams
from speccompile.runtime.scheduler import Generation
from speccompile.runtime.text import TextStream

SMALL = {"vocab_size": 8}
FAMILIES = ["dflash", "causal-depth", "eagle3", "dflash2"]


def ragged(count, seed=0, longest=40, vocabulary=8):
    generator = random.Random(seed)
    return [
        [generator.randrange(vocabulary) for _ in range(generator.randint(1, longest))] for _ in range(count)
    ]


def drain(scheduler, requests=(), at_step=None):
    for request in requests:
        scheduler.add(request)
    steps = 0
    while scheduler.busy:
        if at_step:
            at_step(steps)
        scheduler.step()
        steps += 1
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_32_ragged_requests_get_what_each_would_alone(pairs, family):
    pair = pairs(target=SMALL, draft=tiny.FAMILIES[family])
    prompts = ragged(32)
    budgets = [1 + 7 * i % 23 for i in range(32)]
    together = pair.engine.generate(prompts, [SamplingParams(n) for n in budgets])
    alone = [pair.engine.generate([p], n)[0] for p, n in zip(prompts, budgets)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]
    fresh = [i for i, r in enumerate(together) if not r.reused_tokens]
    assert [together[i].proposals for i in fresh] == [alone[i].proposals for i in fresh]
    assert together[3].token_ids == eager_greedy(pair.target, prompts[3], budgets[3])


def test_requests_come_and_go_at_every_step(pairs):
    engine = pairs(target=SMALL, draft=tiny.FAMILIES["causal-depth"]).engine
    prompts = ragged(12, seed=1)
    requests = [engine.request(p, SamplingParams(10)) for p in prompts]
    scheduler = engine.scheduler(3, prefill_chunk=6)
    most = 0

    def arrive(step):
        nonlocal most
        if step < len(requests) - 1:
            scheduler.add(requests[step + 1])
        most = max(most, len(scheduler.active))

    drain(scheduler, requests[:1], arrive)
    assert most == 3 and not scheduler.waiting
    assert [r.result.token_ids for r in requests] == [engine.generate([p], 10)[0].token_ids for p in prompts]
    assert all(r.result.time_to_first_token > 0 for r in requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_beginning_is_not_fed_again(pairs, family):
    """The next request of a conversation: proposals, which would show a wrong draft cache, are the same too."""
    engine = pairs(target=SMALL, draft=tiny.FAMILIES[family]).engine
    scheduler = engine.scheduler(2, prefill_chunk=64)
    first = engine.request(ragged(1, seed=3, longest=30)[0] + [1, 2, 3], SamplingParams(12))
    drain(scheduler, [first])
    prompt = first.result.prompt + first.result.token_ids + [4, 5]
    second = engine.request(prompt, SamplingParams(12))
    drain(scheduler, [second])
    expected = engine.scheduler(2, prefill_chunk=64)
    fresh = engine.request(prompt, SamplingParams(12))
    drain(expected, [fresh])
    assert second.result.reused_tokens >= len(first.result.prompt) + 10 and fresh.result.reused_tokens == 0
    assert second.result.token_ids == fresh.result.token_ids
    assert second.result.proposals == fresh.result.proposals


def test_rows_are_copied_from_a_slot_at_work(pairs):
    engine = pairs(target=SMALL, draft=tiny.FAMILIES["causal-depth"], max_seq_len=128).engine
    scheduler = engine.scheduler(2, prefill_chunk=64)
    system = ragged(1, seed=5, longest=1)[0] * 50
    first = engine.request([*system, 1], SamplingParams(40))
    scheduler.add(first)
    scheduler.step()
    scheduler.step()
    second = engine.request([*system, 2, 3], SamplingParams(20))
    drain(scheduler, [second])
    assert second.result.reused_tokens == 49
    for request in (first, second):
        alone = engine.generate([request.result.prompt], request.params)[0]
        assert request.result.token_ids == alone.token_ids


def test_a_retired_cache_survives_idle_steps(pairs):
    """While its slot is free, padding is written behind what it keeps."""
    engine = pairs(target=SMALL, draft=tiny.FAMILIES["causal-depth"]).engine
    scheduler = engine.scheduler(2, prefill_chunk=16)
    first, other = (
        engine.request([1, 2, 3, 4], SamplingParams(4)),
        engine.request([5] * 30, SamplingParams(30)),
    )
    drain(scheduler, [first, other])
    again = engine.request(first.result.prompt + first.result.token_ids, SamplingParams(8))
    drain(scheduler, [again])
    assert again.result.reused_tokens >= 5
    assert again.result.token_ids == engine.generate([again.result.prompt], 8)[0].token_ids


def test_a_long_prompt_delays_the_others_by_bounded_steps(pairs):
    engine = pairs(target=SMALL, draft={"family": "dflash"}, max_seq_len=200).engine
    scheduler = engine.scheduler(2, prefill_chunk=128, max_step_tokens=32)
    rows = []
    step = scheduler.session.step
    scheduler.session = SimpleNamespace(
        **{
            n: getattr(scheduler.session, n)
            for n in ("batch", "width", "row_limit", "max_seq_len", "copy_rows")
        },
        step=lambda tokens, *rest: rows.append(tokens.shape[1]) or step(tokens, *rest),
    )
    short, long = engine.request([1], SamplingParams(40)), engine.request([2] * 150, SamplingParams(4))
    scheduler.add(short)
    scheduler.step()
    drain(scheduler, [long])
    assert max(rows) == 16 and len(long.result.token_ids) == 4  # 32 tokens over two slots
    alone = engine.scheduler(2, prefill_chunk=128, max_step_tokens=32)
    alone.session, rows[:] = scheduler.session, []
    drain(alone, [engine.request([2] * 150, SamplingParams(4))])
    assert rows[:2] == [128, 22]  # nobody waits: whole chunks


def test_aborted_requests_free_their_slots(pairs):
    engine = pairs(target=SMALL, draft={"family": "dflash"}).engine
    scheduler = engine.scheduler(1)
    running, waiting, last = (engine.request([n], SamplingParams(20)) for n in (1, 2, 3))
    for request in (running, waiting, last):
        scheduler.add(request)
    scheduler.step()
    scheduler.step()
    scheduler.abort(waiting)
    scheduler.abort(running)
    drain(scheduler)
    assert (running.result.finish_reason, waiting.result.finish_reason) == ("abort", "abort")
    assert waiting.result.token_ids == [] and running.result.token_ids
    assert last.result.token_ids == engine.generate([[3]], 20)[0].token_ids
    scheduler.abort(last)
    assert last.result.finish_reason == "length"


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrower_block_changes_no_text(pairs, width):
    engine = pairs(target=SMALL, draft=tiny.FAMILIES["causal-depth"]).engine
    full, narrow = (engine.generate(ragged(4), 20, block_width=w) for w in (None, width))
    assert [r.token_ids for r in narrow] == [r.token_ids for r in full]
    assert {len(p) for r in narrow for p in r.proposals} == {width - 1}
    assert max(n for r in narrow for n in r.acceptance_lengths) <= width


def test_one_params_for_all_or_one_each(pairs):
    engine = pairs(target=SMALL, draft={"family": "dflash"}).engine
    assert engine.generate([], 4) == []
    with pytest.raises(UserError, match="2 prompts were given with 1 params"):
        engine.generate([[1], [2]], [SamplingParams(3)])
    assert isinstance(engine.generate([[1]], 2)[0], Generation)


class Bytes:
    """A byte-level tokenizer: a token is a byte, characters may span tokens."""

    def decode(self, tokens, skip_special_tokens=True):
        return bytes(tokens).decode("utf-8", errors="replace")


texts = st.text(st.sampled_from("ab é漢🎉\n"), max_size=40)


@given(texts, st.lists(st.text(st.sampled_from("ab é漢"), min_size=1, max_size=4), max_size=3))
def test_text_comes_in_pieces_that_make_the_whole_and_ends_before_a_stop_string(text, stops):
    stream, pieces = TextStream(Bytes(), tuple(stops)), []
    for token in text.encode():
        stopped = stream.add(token)
        pieces.append(stream.take())
        assert "\ufffd" not in pieces[-1]
        if stopped:
            break
    stream.finish()
    pieces.append(stream.take())
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if found:
        end = min(found)[0]  # the stop string that is complete first
        expected = text[: min(start for ended, start in found if ended == end)]
        assert stream.stopped
    else:
        expected = text
        assert not stream.stopped
    assert "".join(pieces) == stream.text == expected


def test_half_a_character_at_the_end_is_shown_as_such():
    stream = TextStream(Bytes())
    for token in "aé".encode()[:2]:
        stream.add(token)
    assert stream.take() == "a"
    stream.finish()
    assert stream.take() == "\ufffd"


def test_a_stop_string_ends_the_sequence_with_the_token_that_completes_it(pairs, monkeypatch):
    """One truncation for ids, text and counts, wherever in a block it falls."""
    pair = pairs(target={"vocab_size": 8}, draft=tiny.FAMILIES["causal-depth"])
    letters = SimpleNamespace(
        decode=lambda tokens, skip_special_tokens=True: "".join("abcdefgh"[t] for t in tokens)
    )
    monkeypatch.setattr(pair.engine, "_tokenizer", letters)
    free = pair.engine.generate([[1, 2]], 24)[0].token_ids
    whole = letters.decode(free)
    for start in range(0, 12, 3):
        stop = whole[start : start + 2]
        at = whole.find(stop)
        result = pair.engine.generate([[1, 2]], SamplingParams(24, stop=stop))[0]
        assert result.token_ids == free[: at + 2] and result.text == whole[:at]
        assert result.finish_reason == "stop" and 1 + sum(result.acceptance_lengths) == at + 2
    assert "".join(pair.engine.stream([1, 2], SamplingParams(24))) == whole
    pieces = pair.engine.stream([1, 2], SamplingParams(24))
    assert next(pieces) and pieces.close() is None  # an abandoned stream
    assert np.array_equal(pair.engine.generate([[1, 2]], 24)[0].token_ids, free)


def test_async_requests_share_the_batch(pairs, monkeypatch):
    pair = pairs(target={"vocab_size": 8}, draft=tiny.FAMILIES["causal-depth"])
    letters = SimpleNamespace(
        decode=lambda tokens, skip_special_tokens=True: "".join("abcdefgh"[t] for t in tokens)
    )
    monkeypatch.setattr(pair.engine, "_tokenizer", letters)
    prompts = ragged(12, seed=4)

    async def text(engine, prompt):
        return "".join([piece async for piece in engine.stream(prompt, SamplingParams(20))])

    async def abandon(engine):
        async for _ in engine.stream([1], SamplingParams(60)):
            return

    async def main():
        with AsyncEngine(pair.engine, slots=3) as engine:
            await abandon(engine)
            results = asyncio.gather(*(engine.generate(p, SamplingParams(20)) for p in prompts))
            texts = await asyncio.gather(*(text(engine, p) for p in prompts))
            tokens = [r.token_ids for r in await results]
            return tokens, texts

    tokens, texts = asyncio.run(main())
    assert tokens == [pair.engine.generate([p], 20)[0].token_ids for p in prompts]
    assert texts == [letters.decode(t) for t in tokens]
