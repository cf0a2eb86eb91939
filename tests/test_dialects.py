"""The dialect table: every published form is recognised by itself, means one thing, and is refused when it contradicts itself."""

import json

import pytest
import references
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_references import SEEDS

from speccompile.compiler import checkpoint
from speccompile.compiler.drafts.dialects import DIALECTS
from speccompile.compiler.drafts.loading import load_draft, resolve_draft, save_draft
from speccompile.export.errors import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """family -> (draft checkpoint in its own dialect, its target, the reference)"""
    made = {}

    def save(family, seed=1):
        if (family, seed) not in made:
            root = tmp_path_factory.mktemp("pair")
            reference = references.FAMILIES[family](seed)
            target = references.save_target(root / "target", reference.shape, seed)
            reference.save(root / "draft", target)
            made[family, seed] = root / "draft", target, reference
        return made[family, seed]

    return save


def copy(draft, to, change=None, tensors=None):
    """A checkpoint with its config (and tensors) changed in place by the functions given."""
    to.mkdir()
    raw, state = json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    if change:
        change(raw)
    if tensors:
        tensors(state)
    (to / "config.json").write_text(json.dumps(raw))
    save_file({k: v.contiguous() for k, v in state.items()}, to / "model.safetensors")
    return to


def refusal(draft, target):
    config = checkpoint.target_config(target)
    with pytest.raises(UserError) as caught:
        load_draft(draft, resolve_draft(draft, config), "float32")
    text = str(caught.value)
    assert "\n" not in text and str(draft) in text
    return text


def test_every_dialect_of_the_table_has_a_reference():
    assert set(references.FAMILIES) == set(SEEDS)
    covered = set(SEEDS) - {"SpecForge DFlash"}  # z-lab's form, letter for letter
    assert {d.name for d in DIALECTS} - {"speccompile"} == covered


@pytest.mark.parametrize("family", SEEDS)
def test_a_draft_is_recognised_and_converted(saved, tmp_path, family):
    draft, target, reference = saved(family)
    served = checkpoint.target_config(target)
    config = resolve_draft(draft, served)
    assert config.dialect == ("z-lab DFlash" if family == "SpecForge DFlash" else family)
    module = load_draft(draft, config, None)
    (tmp_path / "ours").mkdir()
    save_draft(module, tmp_path / "ours")
    again = resolve_draft(tmp_path / "ours", served)
    assert again == config and again.dialect == "speccompile"
    ours = load_draft(tmp_path / "ours", again, None).state_dict()
    assert all(torch.equal(ours[name], value) for name, value in module.state_dict().items())


def test_layer_ids_mean_one_thing_in_every_dialect(saved):
    """methods.md 5.2: the same id is hidden_states[i+1] in one dialect and hidden_states[i] in another."""
    for family in SEEDS:
        for seed in (1, 2):
            draft, target, reference = saved(family, seed)
            taps = (
                reference.taps
                if "agle" in family or "EAGLE" in family
                else [i + 1 for i in reference.shape.taps]
            )
            assert resolve_draft(draft, checkpoint.target_config(target)).tapped_hidden_states == tuple(taps)


@pytest.mark.parametrize("family", SEEDS)
def test_a_tap_of_the_last_layer_is_refused_in_every_dialect(saved, tmp_path, family):
    """hidden_states[L] is taken after the final norm, where servers mean the raw residual."""
    draft, target, reference = saved(family)
    last = reference.shape.target_layers

    def change(raw):
        for place in (raw, raw.get("dflash_config") or {}, raw.get("eagle_config") or {}):
            for key in ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
                if isinstance(place.get(key), list):
                    place[key][-1] = last if "speculators" in family else last - 1

    assert f"hidden_states[{last}]" in refusal(copy(draft, tmp_path / "d", change), target)


@pytest.mark.parametrize("family", SEEDS)
def test_a_key_nobody_knows_is_named(saved, tmp_path, family):
    draft, target, _ = saved(family)
    text = refusal(copy(draft, tmp_path / "d", lambda raw: raw.update(draft_temperament=3)), target)
    assert "draft_temperament = 3 is not a key this dialect is known to have" in text


@pytest.mark.parametrize("family", SEEDS)
def test_a_tensor_nobody_claims_is_named(saved, tmp_path, family):
    """charlie12345/ROCmFPX#44: seven tensors went unclaimed."""
    draft, target, _ = saved(family)
    text = refusal(
        copy(draft, tmp_path / "d", tensors=lambda s: s.update({"layers.0.extra.weight": torch.zeros(2)})),
        target,
    )
    assert "layers.0.extra.weight" in text and "does not use" in text


@pytest.mark.parametrize("family", SEEDS)
def test_a_tensor_that_is_missing_is_named(saved, tmp_path, family):
    draft, target, _ = saved(family)
    assert "lacks the tensor fc.weight" in refusal(
        copy(draft, tmp_path / "d", tensors=lambda s: s.pop("fc.weight")), target
    )


@pytest.mark.parametrize("family", SEEDS)
def test_a_config_that_disagrees_with_its_tensors(saved, tmp_path, family):
    draft, target, reference = saved(family)

    def change(raw):
        raw.get("transformer_layer_config", raw)["intermediate_size"] = 7

    assert "config.json asks for" in refusal(copy(draft, tmp_path / "d", change), target)


@pytest.mark.parametrize("family", SEEDS)
@pytest.mark.parametrize("other", [dict(hidden_size=24), dict(vocab_size=700)])
def test_a_target_it_was_not_made_for(saved, tmp_path, family, other):
    draft, _, reference = saved(family)
    sizes = (
        dict(
            vocab_size=references.VOCABULARY,
            hidden_size=reference.shape.hidden,
            num_hidden_layers=reference.shape.target_layers,
        )
        | other
    )
    target = tiny.save_target(
        tmp_path / "target", "qwen3", head_dim=8, num_attention_heads=2, num_key_value_heads=1, **sizes
    )
    key, value = next(iter(other.items()))
    text = refusal(draft, target)
    assert f"{key} {value}" in text.replace("this target has", key) or str(value) in text
    assert "pair it with its own target" in text


def test_the_required_keys_of_every_dialect(saved, tmp_path):
    """sgl-project/sglang#37475: without target_layer_ids a formula guessed; right count, wrong layers, no error."""
    required = {
        "z-lab DFlash": ("target_layer_ids", "mask_token_id", "block_size", "num_target_layers"),
        "z-lab DFlash 2": ("conv_group_size", "selector_rank", "selector_top_k"),
        "SpecForge Domino": ("gru_hidden_dim", "emb_dim"),
        "SpecForge DSpark": ("markov_rank", "markov_head_type", "mask_token_id"),
        "DeepSpec": ("target_layer_ids", "markov_rank", "enable_confidence_head"),
        "speculators dflash": (
            "aux_hidden_state_layer_ids",
            "mask_token_id",
            "draft_vocab_size",
            "transformer_layer_config",
        ),
        "speculators dflash2": ("conv_kernel_size", "selector_rank"),
        "speculators xpress": ("xpress_rank", "num_jacobi_passes"),
    }
    for family, keys in required.items():
        draft, target, _ = saved(family)
        for key in keys:

            def change(raw, key=key):
                raw.pop(key, None)
                (raw.get("dflash_config") or {}).pop(key, None)

            text = refusal(copy(draft, tmp_path / f"{family}{key}".replace(" ", ""), change), target)
            assert key in text and "nothing is guessed" in text


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("z-lab DFlash", lambda raw: raw["dflash_config"].update(projector_type="domino", causal_head=True), "ambiguous"),
        ("z-lab DFlash 2", lambda raw: raw["dflash_config"].update(causal_head=True), "ambiguous"),
        ("JetSpec", lambda raw: raw.update(is_causal=False), "contradict each other"),
        ("z-lab DFlash", lambda raw: raw["dflash_config"].update(causal=not raw.get("is_causal", False), causal_x=None) or raw.update(is_causal=not raw["dflash_config"]["causal"]), "contradict each other"),
        ("speculators dflash", lambda raw: raw.update(block_size=raw["block_size"] + 1), "speculative_tokens"),
        ("EAGLE-3", lambda raw: raw.update(norm_output=True), "opposite ways"),
        ("EAGLE-3", lambda raw: raw.update(eagle_aux_hidden_state_layer_ids=[0, 1, 1]), "name different taps"),
        ("EAGLE-3", lambda raw: raw.update(num_aux_hidden_states=4), "num_aux_hidden_states is 4"),
        ("EAGLE-3", lambda raw: raw.update(norm_before_fc=True, fc_norm=True), "exclude each other"),
        ("EAGLE-3", lambda raw: raw["eagle_config"].update(use_aux_hidden_state=False), "not EAGLE-3"),
        ("SpecForge DSpark", lambda raw: raw["dflash_config"].update(markov_head_type="mystic"), "vanilla, gated or rnn"),
        ("speculators dflash", lambda raw: raw.update(speculators_model_type="peagle"), "P-EAGLE"),
        ("speculators dflash", lambda raw: raw.update(speculators_model_type="mtp"), "an MTP head"),
        ("speculators dflash", lambda raw: raw.update(speculators_model_type="crystal"), "speculators_model_type 'crystal', which is no draft"),
        ("speculators eagle3", lambda raw: raw["transformer_layer_config"].update(model_type="gemma2"), "llama or qwen3 layers"),
        ("DeepSpec", lambda raw: raw.update(architectures=["Gemma4DSparkModel"]), "only Qwen3-shaped layers"),
        ("z-lab DFlash", lambda raw: raw.update(target_num_hidden_layers=4), "a DFly draft"),
        ("z-lab DFlash", lambda raw: raw.update(architectures=["SomethingNew"]), "no draft this version knows"),
        ("z-lab DFlash", lambda raw: raw.update(quantization_config={"quant_method": "gptq"}), "the draft is quantised"),
        ("z-lab DFlash", lambda raw: raw["dflash_config"].update(use_swa=True) or raw.update(layer_types=None, sliding_window=None), "says how wide"),
        ("z-lab DFlash", lambda raw: raw.update(dflash_config=[1]), "an object was expected"),
        ("z-lab DFlash 2", lambda raw: raw["dflash_config"].update(conv_group_size=5), "is not a multiple of conv_group_size"),
        ("z-lab DFlash 2", lambda raw: raw["dflash_config"].update(selector_top_k=99), "99 candidates a row"),
        ("z-lab DFlash", lambda raw: raw["dflash_config"].update(mask_token_id=99), "outside the vocabulary"),
        ("JetSpec", lambda raw: raw["dflash_config"].update(target_hidden_size=1234), "untrained adapter"),
    ],
)  # fmt: skip
def test_what_is_refused(saved, tmp_path, family, change, words):
    draft, target, _ = saved(family)
    assert words in refusal(copy(draft, tmp_path / "d", change), target)


def test_a_side_file_is_not_overlooked(saved, tmp_path):
    """sgl-project/sglang#27924: the mask row lives in mask_embedding.pt, and acceptance fell from 6.3 to 1.4 without it."""
    draft, target, _ = saved("z-lab DFlash")
    torch.save({}, copy(draft, tmp_path / "d") / "mask_embedding.pt")
    assert "mask_embedding.pt is a pickle" in refusal(tmp_path / "d", target)


def test_windows_without_layer_types(saved, tmp_path):
    """`use_swa` alone: every layer windowed, and bidirectional (vLLM's reading of these files)."""
    draft, target, reference = saved("z-lab DFlash", 3)

    def change(raw):
        raw.update(layer_types=None, sliding_window=None, is_causal=None)
        raw["dflash_config"].update(use_swa=True, swa_window_size=11)

    config = resolve_draft(copy(draft, tmp_path / "d", change), checkpoint.target_config(target))
    assert set(config.windows) == {11} and not any(config.causal)


def test_two_conventions_for_eagle_layer_ids(saved, tmp_path):
    """The same key: layers counted from 0 inside eagle_config (SGLang), hidden states at the top level (vLLM)."""
    draft, target, reference = saved("EAGLE-3")

    def change(raw):
        raw["eagle_aux_hidden_state_layer_ids"] = reference.taps

    both = resolve_draft(copy(draft, tmp_path / "both", change), checkpoint.target_config(target))
    assert both.tapped_hidden_states == tuple(reference.taps)

    def silent(raw):
        raw["eagle_config"] = None

    served = checkpoint.target_config(
        tiny.save_target(
            tmp_path / "t",
            hidden_size=reference.shape.hidden,
            vocab_size=references.VOCABULARY,
            num_hidden_layers=12,
        )
    )
    assert resolve_draft(copy(draft, tmp_path / "silent", silent), served).tapped_hidden_states == (2, 6, 9)


def reduced(saved):
    for seed in range(8):
        draft, target, reference = saved("EAGLE-3", seed)
        if reference.reduced:
            return draft, target
    raise AssertionError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("d2t"), "lacks the tensor d2t"),
        (lambda s: s.update(d2t=torch.tensor([0, 2, 3, 6, 7])), "must hold offsets"),
        (lambda s: s.update(d2t=torch.zeros(5, dtype=torch.int64)), "t2d and d2t disagree"),
        (lambda s: s.update(d2t=s["d2t"][:4]), "d2t has shape (4,)"),
        (lambda s: s.update(d2t=s["d2t"].float()), "whole numbers were expected"),
        (lambda s: s.pop("lm_head.weight"), "holds no lm_head.weight of its own"),
    ],
)  # fmt: skip
def test_a_reduced_vocabulary_needs_its_map_and_head(saved, tmp_path, change, words):
    """NVIDIA-NeMo/Automodel#2447, verl-SpeCo#67, vllm-ascend#9795: a missing map, ids for offsets, the target's head."""
    draft, target = reduced(saved)
    assert words in refusal(copy(draft, tmp_path / "d", tensors=change), target)


def test_the_head_is_decided_by_the_tensors(saved, tmp_path):
    """An own lm_head in the file is used (vllm-ascend#9795), and a map without one is none (vllm-project/vllm#46435)."""
    draft, target, _ = saved("z-lab DFlash", 0)
    served = checkpoint.target_config(target)
    assert not resolve_draft(draft, served).own_head
    head = torch.randn(references.VOCABULARY, served.hidden_size)
    own = copy(draft, tmp_path / "own", tensors=lambda s: s.update({"lm_head.weight": head}))
    module = load_draft(own, resolve_draft(own, served), "float32")
    module.lend(
        *(torch.nn.Parameter(torch.zeros(references.VOCABULARY, served.hidden_size)) for _ in range(2))
    )
    assert torch.equal(module.head, head) and not module.embedding.any()
    identity = torch.zeros(references.VOCABULARY, dtype=torch.int64)
    mapped = copy(draft, tmp_path / "mapped", tensors=lambda s: s.update(d2t=identity))
    assert not load_draft(mapped, resolve_draft(mapped, served), "float32").config.own_head
    arange = copy(
        draft, tmp_path / "arange", tensors=lambda s: s.update(d2t=torch.arange(references.VOCABULARY))
    )
    assert "all zeros" in refusal(arange, target)


def test_markov_tables_live_in_two_vocabularies(saved, tmp_path):
    """vllm-ascend#16166: rows of w1 are the target's tokens, rows of w2 the draft's."""
    draft, target, reference = saved("speculators dspark", 3)
    assert reference.reduced

    def swap(state):
        w1, w2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
        state[w1], state[w2] = state[w2], state[w1]

    assert "markov_w" in refusal(copy(draft, tmp_path / "d", tensors=swap), target)


def test_a_padded_vocabulary_is_the_same_vocabulary(saved, tmp_path):
    """vllm-project/vllm#46435: draft 152064, target padded to 152576; the target's tables serve both."""
    draft, _, reference = saved("z-lab DFlash", 0)
    target = tiny.save_target(
        tmp_path / "t",
        hidden_size=reference.shape.hidden,
        vocab_size=64,
        num_hidden_layers=reference.shape.target_layers,
    )
    assert resolve_draft(draft, checkpoint.target_config(target)).vocab_size == references.VOCABULARY


ODD = (
    None,
    "x",
    "",
    -1,
    0,
    1,
    3,
    2.5,
    10**9,
    True,
    False,
    [],
    {},
    [1, "a"],
    [-1, 0],
    [[1]],
    {"rope_type": "yarn"},
    {"a": 1},
    float("nan"),
)


def places(raw):
    """Every object of a config that holds keys, and its keys."""
    yield raw, list(raw)
    for value in raw.values():
        if isinstance(value, dict):
            yield from places(value)


@pytest.mark.parametrize("family", SEEDS)
def test_no_value_of_any_key_is_a_crash(saved, tmp_path, family):
    """Each key of each dialect with each of some odd values: read, or refused in one sentence."""
    draft, target, _ = saved(family)
    served, tried, refused = checkpoint.target_config(target), 0, 0
    copied = copy(draft, tmp_path / "odd")
    text = (draft / "config.json").read_text()
    for place, (_, keys) in enumerate(places(json.loads(text))):
        for key in keys:
            for odd in ODD:
                raw = json.loads(text)
                list(places(raw))[place][0][key] = odd
                (copied / "config.json").write_text(json.dumps(raw))
                tried += 1
                try:
                    load_draft(copied, resolve_draft(copied, served), None)
                except UserError as error:
                    refused += 1
                    assert "\n" not in str(error), (key, odd)
                except Exception as error:
                    raise AssertionError(f"{key} = {odd!r}") from error
    assert tried / 2 < refused < tried  # unused keys of Transformers' configurations take anything


def test_both_layouts_are_told_apart(saved):
    """vllm-project/vllm#49614: DeepSpec's DFlash read in place accepts less than one token in a hundred."""
    draft, target, reference = saved("DeepSpec", 0)
    config = resolve_draft(draft, checkpoint.target_config(target))
    assert (
        config.family == "dflash"
        and config.layout == "anchor_first"
        and config.block_width == reference.width
    )
    draft, target, reference = saved("z-lab DFlash", 0)
    config = resolve_draft(draft, checkpoint.target_config(target))
    assert (
        config.family in ("dflash", "jetspec")
        and config.layout == "in_place"
        and config.block_width == reference.width
    )
