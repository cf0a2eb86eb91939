"""Proposals and text equal those of z-lab's own generation loop, position by position, with every kind of acceptance.

`test_references.py` compares single steps of every family; here the reference keeps its own caches and its own loop.

The reference is PyPI's `dflash` (installed without its dependencies by the test command). Its loop narrows the last
blocks to the budget left; proposals are compared while blocks are whole, by giving it a budget longer than the text.
"""

import json
import shutil

import pytest
import tiny
import torch

from speccompile.compiler.build import BuildOptions, build
from speccompile.runtime import Engine

reference = pytest.importorskip(
    "dflash.model", reason="`pip install --no-deps dflash==0.1.0` brings the reference"
)

SHAPES = {
    "gqa": (dict(), dict()),
    "five_layers": (dict(num_hidden_layers=6), dict(layers=5, tapped_hidden_states=(1, 5, 3))),
    "bidirectional_window": (dict(), dict(windows=(9, 9))),
    "scaled_and_capped": (dict(), dict(output_multiplier=0.7, final_logit_softcapping=3.0, input_embedding_scale=1.5)),
    "yarn": (dict(), dict(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32})),
    "attention_bias": (dict(), dict(attention_bias=True)),
}  # fmt: skip


def load_reference(path):
    from transformers import Qwen3Config

    raw = json.loads((path / "config.json").read_text())
    config = Qwen3Config(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")})
    model = reference.DFlashDraftModel(config)
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    return model.eval()


@torch.no_grad()
def reference_run(model, target, prompt, steps, block):
    """Proposals and emitted tokens of the reference's own loop, recorded at its calls of the target."""
    proposals, calls = [], []
    original = type(target).forward

    def recorded(self, input_ids=None, *args, **kwargs):
        calls.append(input_ids[0].tolist())
        return original(self, input_ids, *args, **kwargs)

    type(target).forward = recorded
    try:
        result = reference.dflash_generate(
            model, target, torch.tensor([prompt]), steps, None, block_size=block, return_stats=False
        )
    finally:
        type(target).forward = original
    for call in calls[1:]:
        proposals.append(call[1:])
    return proposals, result[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_references_own_loop(tmp_path, shape, width=5):
    target_options, draft_options = SHAPES[shape]
    steps = hits = 0
    target_path = tiny.save_target(
        tmp_path / "target", "qwen3", head_dim=16, vocab_size=5, **{k: v for k, v in target_options.items()}
    )
    for seed in range(8):  # further drafts until one has had proposals accepted
        if hits and seed >= (2 if width == 5 else 1):
            break
        ours = tiny.save_draft(
            tmp_path / f"draft{seed}", target_path, seed=seed, block_width=width, **draft_options
        )
        zlab_path = tmp_path / f"zlab{seed}"
        shutil.copytree(ours, zlab_path)
        (zlab_path / "config.json").write_text(json.dumps(tiny.zlab(ours)))
        build(BuildOptions(str(target_path), str(zlab_path), tmp_path / f"engine{seed}", max_seq_len=128))
        engine = Engine.load(tmp_path / f"engine{seed}", threads=1)
        from transformers import AutoModelForCausalLM

        target = AutoModelForCausalLM.from_pretrained(target_path, attn_implementation="eager").eval()
        model = load_reference(zlab_path)
        for prompt in ([1, 2, 3], [4] * 14, [0, 4, 1, 3, 2, 3] * 5):
            expected, tokens = reference_run(model, target, prompt, 40 + width, width)
            result = engine.generate([prompt], 40)[0]
            assert result.token_ids == tokens[:40]
            whole = [p for p in expected if len(p) == width - 1][: len(result.proposals)]
            assert result.proposals[: len(whole)] == whole
            steps += len(whole)
            hits += sum(n > 1 for n in result.acceptance_lengths)
    assert steps > 10
    assert hits > 0  # partial acceptance did occur
