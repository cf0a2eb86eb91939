"""Faults that others met in the field, each by name, on drafts of every family they concern.

Those of layer ids, keys, tables and maps are in `test_dialects.py`; of stops, mask tokens in the text, lengths and
batches in `test_generation.py`; of windows, first blocks, layouts and head inputs in `test_references.py`.
"""

import json

import onnx
import pytest
import tiny
import torch
from builder import eager_greedy
from safetensors.torch import load_file, save_file

from speccompile.compiler.build import BuildOptions, build
from speccompile.export.directory import STEP
from speccompile.export.errors import UserError
from speccompile.runtime import Engine

SMALL = {"vocab_size": 11}
DSPARK = tiny.FAMILIES["dspark"]


def test_a_first_proposal_is_never_committed_unverified(pairs):
    """lattice#243: with a draft that is always wrong, the text is still the target's, one token a step."""
    pair = pairs(target=SMALL, draft=tiny.FAMILIES["dflash"] | {"seed": 5})
    prompt = [1, 2, 3]
    truth = eager_greedy(pair.target, prompt, 40)
    result = pair.engine.generate([prompt], 30)[0]
    assert result.token_ids == truth[:30]
    at = 0
    for proposals, used in zip(result.proposals, result.acceptance_lengths, strict=True):
        if proposals[0] != truth[at + 1]:
            assert used == 1
        at += used


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_acceptance_is_counted_from_emitted_tokens(pairs, family):
    """microsoft/onnxruntime-genai#2460: a drafter that read the wrong tensor reported an acceptance of exactly 1.000."""
    result = pairs(target=SMALL, draft=tiny.FAMILIES[family]).engine.generate([[1, 2, 3]], 25)[0]
    assert 1 + sum(result.acceptance_lengths) == len(result.token_ids)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_eight_anchors_in_one_batch(pairs, family):
    """lightseekorg/tokenspeed#1695: the anchors' column was read as contiguous; only row 0 of a batch was right."""
    engine = pairs(target=SMALL, draft=tiny.FAMILIES[family]).engine
    batch = [[i, 10 - i, i] for i in range(8)]
    together = engine.generate(batch, 12)
    assert len({r.token_ids[0] for r in together}) > 2
    for prompt, result in zip(batch, together, strict=True):
        alone = engine.generate([prompt], 12)[0]
        assert (result.token_ids, result.proposals) == (alone.token_ids, alone.proposals)


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_a_chunk_of_prefill_pairs_its_last_row_with_the_next_prompt_token(pairs, chunk):
    """A chain's row is fed the token after it: at a chunk's end that is the prompt's, not the target's own choice."""
    engine = pairs(target=SMALL, draft=tiny.FAMILIES["eagle3"]).engine
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    whole = engine.generate([prompt], 20, prefill_chunk=64)[0]
    assert engine.generate([prompt], 20, prefill_chunk=chunk)[0].proposals == whole.proposals


def test_a_prefill_chunk_longer_than_the_drafts_window(pairs):
    """Neroued/ninfer#5: rows of one chunk see windows of their own."""
    engine = pairs(target=SMALL, draft=tiny.FAMILIES["dflash2"]).engine
    prompt = [i * 7 % 11 for i in range(40)]
    whole = engine.generate([prompt], 15, prefill_chunk=64)[0]
    assert engine.generate([prompt], 15, prefill_chunk=4)[0].proposals == whole.proposals


def test_half_precision_of_dflash_2_does_not_overflow(pairs):
    """vllm-project/vllm#55250: layer 0's residual passes float16's 65,504; then NaN, ids 0 to 15, nothing accepted."""
    big = tiny.FAMILIES["dflash2"] | {"windows": (None, None)}
    pair = pairs(target=SMALL, draft=big)
    path = pair.draft_path.parent / "big"
    path.mkdir(exist_ok=True)
    state = load_file(pair.draft_path / "model.safetensors")
    state["layers.0.self_attn.o_proj.weight"] *= 5e3
    state["layers.0.attention_conv.base_kernel"][1] = 40.0
    save_file(state, path / "model.safetensors")
    (path / "config.json").write_text((pair.draft_path / "config.json").read_text())
    results = {}
    for dtype in ("float32", "float16"):
        build(BuildOptions(str(pair.target_path), str(path), path / dtype, max_seq_len=64, dtype=dtype))
        results[dtype] = Engine.load(path / dtype, threads=1).generate([[1, 2, 3]], 24)[0]
    model = onnx.load(path / "float16" / STEP, load_external_data=False)
    assert any(node.op_type == "Cast" for node in model.graph.node)
    expected = {tuple(p) for p in results["float32"].proposals}
    shared = expected & {tuple(p) for p in results["float16"].proposals}
    assert len(shared) > len(expected) / 2, (expected, shared)


def test_a_draft_trained_for_fewer_positions_than_the_text_has(pairs):
    """vllm-project/vllm#57964: a RoPE table sized by the draft was read past its end. There is none here: the text goes on."""
    pair = pairs(target=SMALL, draft=tiny.FAMILIES["dflash"] | {"max_position_embeddings": 8})
    assert pair.engine.generate([[1, 2, 3]], 40)[0].token_ids == eager_greedy(pair.target, [1, 2, 3], 40)


def test_a_drafts_rope_that_changes_with_the_length_is_refused(pairs):
    with pytest.raises(
        UserError, match="draft's rotary embedding .dynamic. changes its frequencies past 16 positions"
    ):
        pairs(
            draft={
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 16,
            }
        )


def test_the_vocabulary_map_stays_a_named_tensor(pairs):
    """vllm-rbln#831: arange + d2t was folded to an unnamed constant at export."""
    known = [0, 2, 3, 6, 7, 10]
    pair = pairs(
        target=SMALL,
        draft={"family": "dflash", "own_head": True, "draft_vocab_size": 6, "seed": 3, "d2t": known},
    )
    model = onnx.load(pair.engine.directory.path / STEP, load_external_data=False)
    assert [i.name for i in model.graph.initializer if "d2t" in i.name]
    result = pair.engine.generate([[1, 2, 3]], 20)[0]
    proposed = {t for p in result.proposals for t in p}
    assert len(proposed) > 1 and proposed <= set(known)


def test_confidence_cuts_the_block_and_leaves_the_text(pairs):
    pair = pairs(target=SMALL, draft=DSPARK, block_width=6)
    whole = pair.engine.generate([[1, 2, 3]], 24)[0]
    confidences = sorted(c for row in whole.confidences for c in row)
    threshold = confidences[len(confidences) // 2]
    cut = pairs(target=SMALL, draft=DSPARK, block_width=6, confidence_threshold=threshold).engine.generate(
        [[1, 2, 3]], 24
    )[0]
    assert cut.token_ids == whole.token_ids
    assert {len(p) for p in cut.proposals} > {5} or len({len(p) for p in cut.proposals}) > 1
    for proposals, row in zip(cut.proposals, cut.confidences, strict=True):
        assert len(proposals) == next((i for i, c in enumerate(row) if c < threshold), 5)


def test_confidence_cuts_each_sequence_of_a_batch_by_itself(pairs):
    engine = pairs(target=SMALL, draft=DSPARK, block_width=6, confidence_threshold=0.5).engine
    batch = [[i, 2, 3 + i] for i in range(8)]
    for prompt, result in zip(batch, engine.generate(batch, 16), strict=True):
        alone = engine.generate([prompt], 16)[0]
        assert (result.token_ids, result.proposals) == (alone.token_ids, alone.proposals)


@pytest.mark.parametrize("family", ["dspark", "domino"])
def test_a_head_over_all_candidates_is_the_head_over_the_vocabulary(pairs, family):
    draft = tiny.FAMILIES[family]
    whole = pairs(target=SMALL, draft=draft).engine.generate([[1, 2, 3]], 24)[0]
    same = pairs(target=SMALL, draft=draft, head_candidates=11).engine.generate([[1, 2, 3]], 24)[0]
    few = pairs(target=SMALL, draft=draft, head_candidates=1).engine.generate([[1, 2, 3]], 24)[0]
    assert same.proposals == whole.proposals
    assert few.token_ids == whole.token_ids and few.proposals != whole.proposals


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("dflash", {"confidence_threshold": 0.5}, "has no confidence head"),
        ("dspark", {"confidence_threshold": 1.5}, "no probability to cut at"),
        ("dflash", {"head_candidates": 4}, "does not choose among a row's tokens"),
        ("dflash2", {"head_candidates": 4}, "says itself how many"),
        ("dspark", {"head_candidates": 99}, "vocabulary of 11 tokens"),
        ("xpress", {"block_width": 7}, "mixes exactly the 4 rows"),
    ],
)
def test_options_that_do_not_fit_the_draft(pairs, family, options, words):
    with pytest.raises(UserError, match=words):
        pairs(target=SMALL, draft=tiny.FAMILIES[family], **options)


def test_depth_mixing_at_zero_is_plain_dflash(tmp_path):
    """The identities the mixings are initialised with: a shift of zeros, a convolution of its own row alone."""
    target = tiny.save_target(tmp_path / "target", **SMALL)
    proposals = {}
    plain = tiny.save_draft(tmp_path / "plain", target)
    for mixing in ("none", "shift", "convolution"):
        state, raw = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
        raw |= {"depth_mixing": mixing, "conv_kernel_size": 2, "conv_group_size": 8}
        for i in range(2):
            if mixing == "shift":
                state[f"layers.{i}.depth_shift.norm.weight"] = torch.ones(32)
                state[f"layers.{i}.depth_shift.proj.weight"] = torch.zeros(32, 32)
            elif mixing == "convolution":
                for side in ("attention_conv", "mlp_conv"):
                    state[f"layers.{i}.{side}.base_kernel"] = torch.stack(
                        [torch.ones(2, 32), torch.zeros(2, 32)], 1
                    )
                    state[f"layers.{i}.{side}.kernel_projection.weight"] = torch.zeros(16, 32)
        path = tmp_path / mixing
        path.mkdir()
        save_file(state, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(raw))
        build(BuildOptions(str(target), str(path), tmp_path / f"engine-{mixing}", max_seq_len=64))
        proposals[mixing] = (
            Engine.load(tmp_path / f"engine-{mixing}", threads=1).generate([[1, 2, 3]], 24)[0].proposals
        )
    assert proposals["none"] == proposals["shift"] == proposals["convolution"]


def test_what_was_resolved_is_printed_by_build_and_inspect(pairs, capsys, monkeypatch):
    from speccompile.compiler import cli

    pair = pairs(target=SMALL, draft=DSPARK)
    monkeypatch.setenv("COLUMNS", "200")
    for command in (
        [
            "build",
            "--target",
            pair.target_path,
            "--draft",
            pair.draft_path,
            "--out",
            pair.draft_path.parent / "again",
        ],
        ["inspect", pair.engine.directory.path],
    ):
        monkeypatch.setattr("sys.argv", ["speccompile", *map(str, command)])
        with pytest.raises(SystemExit):
            cli.main()
        text = capsys.readouterr().out
        for words in ("dspark, read as speccompile", "in this order", "anchor first", "bidirectional", "windows", "markov_rnn, rank 6",
                      "confidence hidden and previous", "embedding the target's", "rope_theta", "mask token"):  # fmt: skip
            assert words in text, words
