"""Makes the tiny pair: a target of four layers and two drafts for it, from text that ships with Python.

    python samples/tiny/make.py --out samples/tiny        (about 6 minutes on two cores)

The text is Python's own help (`pydoc_data.topics`); every twentieth topic is held out. The target is a Llama of a
million parameters. Both drafts, DFlash and causal-depth, learn from the target's own greedy continuations, with
the same steps, batches and seed, and are then measured through `speccompile` itself on held-out prompts.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from speccompile.compiler.build import BuildOptions, build
from speccompile.compiler.checkpoint import save_draft
from speccompile.compiler.draft import Draft
from speccompile.compiler.draft_config import DraftConfig
from speccompile.runtime import Engine

VOCABULARY, CONTEXT, WIDTH = 1024, 256, 8
PROMPT, ANSWER = (
    32,
    96,
)  # tokens of a draft's training sequence: a prompt from the text, then the target's own
SPECIAL = ["<|endoftext|>", "<|mask|>", "<|user|>", "<|assistant|>"]
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], chat_template=CHAT)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over a twentieth of the steps, then a cosine to a twentieth of the rate."""
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, s / steps))))
    )


def progress(what: str, step: int, steps: int, loss: float, start: float) -> None:
    if step % 50 == 0 or step == steps - 1:
        print(f"{what}: step {step + 1}/{steps}, loss {loss:.3f}, {time.time() - start:.0f} s", flush=True)


def train_target(stream: torch.Tensor, eos: int, steps: int, out: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=eos, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95))
    rate, start = schedule(optimizer, steps), time.time()
    for step in range(steps):
        at = torch.randint(0, len(stream) - CONTEXT - 1, (12, 1)) + torch.arange(CONTEXT + 1)
        batch = stream[at]
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        progress("target", step, steps, loss.item(), start)
    model.to(torch.bfloat16).save_pretrained(out)
    # What the file holds, not what was trained: the drafts must fit the rounded weights.
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval().requires_grad_(False)


@torch.no_grad()
def continuations(target: LlamaForCausalLM, stream: torch.Tensor, count: int) -> torch.Tensor:
    """[count, PROMPT + ANSWER] tokens: prompts from anywhere in the text, continued greedily by the target."""
    rows = []
    for done in range(0, count, 128):
        at = torch.randint(0, len(stream) - PROMPT, (min(128, count - done), 1)) + torch.arange(PROMPT)
        mask = torch.ones_like(at)
        rows.append(
            target.generate(
                stream[at],
                attention_mask=mask,
                min_new_tokens=ANSWER,
                max_new_tokens=ANSWER,
                do_sample=False,
                pad_token_id=0,
            )
        )
        print(f"continuations: {done + len(at)}/{count}", flush=True)
    return torch.cat(rows)


def draft_config(target: LlamaConfig, mask: int, family: str) -> DraftConfig:
    causal = family == "causal-depth"
    return DraftConfig(
        hidden_size=target.hidden_size, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=384, vocab_size=VOCABULARY, num_target_layers=target.num_hidden_layers,
        target_layer_ids=(0, 1, 2), mask_token_id=mask, block_size=WIDTH, causal=(causal,) * 2, windows=(None,) * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=1024,
        depth_mixing="shift" if causal else "none",
    )  # fmt: skip


def block_logits(
    draft: Draft, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """features [N, S, taps*H], tokens [N, S], anchors [N, A] positions -> logits [N*A, K-1, V] of the blocks' proposals.

    A block at anchor n sees the features of positions < n and its own rows.
    """
    count, length = tokens.shape
    blocks = anchors.shape[1]
    context = draft.inject(features, torch.arange(length).expand(count, -1))
    before = (torch.arange(length) < anchors[:, :, None]).flatten(0, 1)[:, None, None, :]  # [N*A, 1, 1, S]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = q.shape[2]
        own = torch.ones(rows, rows, dtype=torch.bool)
        own = own.tril() if draft.config.causal[layer] else own
        mask = torch.cat([before.expand(-1, 1, rows, -1), own.expand(len(q), 1, -1, -1)], dim=-1)
        keys, values = (
            torch.cat([c.repeat_interleave(blocks, 0), own_rows], 2)
            for c, own_rows in zip(context[layer], (k, v))
        )
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    anchor = tokens.gather(1, anchors).flatten()
    positions = anchors.flatten()[:, None] + torch.arange(WIDTH)
    return draft.logits(draft.block_hidden(anchor, positions, attend)[:, 1:])


def train_draft(
    target: LlamaForCausalLM, sequences: torch.Tensor, family: str, mask: int, steps: int, seed: int
) -> Draft:
    torch.manual_seed(seed)
    draft = Draft(draft_config(target.config, mask, family))
    draft.lend(target.get_input_embeddings().weight, target.get_output_embeddings().weight)
    trained = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01, betas=(0.9, 0.95))
    rate, start = schedule(optimizer, steps), time.time()
    weight = torch.exp(
        -torch.arange(WIDTH - 1) / 4.0
    )  # the first proposals count most: later ones need them accepted
    for step in range(steps):
        tokens = sequences[torch.randint(0, len(sequences), (32,))]
        with torch.no_grad():
            hidden = target.model(tokens, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[i + 1] for i in draft.config.target_layer_ids], -1)
        anchors = torch.randint(PROMPT, tokens.shape[1] - WIDTH, (len(tokens), 10))
        labels = tokens.gather(1, (anchors[:, :, None] + torch.arange(1, WIDTH)).flatten(1)).view(
            -1, WIDTH - 1
        )
        logits = block_logits(draft, features, tokens, anchors)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        loss = (losses * weight).sum(1).mean() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        progress(family, step, steps, loss.item(), start)
    return draft


def save(draft: Draft, family: str, out: Path) -> None:
    """bfloat16 weights; the DFlash draft in z-lab's dialect, the causal-depth draft in ours."""
    out.mkdir(parents=True, exist_ok=True)
    save_draft(draft, out)
    state = load_file(out / "model.safetensors")
    save_file(
        {k: v.to(torch.bfloat16) for k, v in state.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    if family == "dflash":
        c = json.loads((out / "config.json").read_text())
        for ours in (
            "causal",
            "windows",
            "depth_mixing",
            "output_multiplier",
            "final_logit_softcapping",
            "input_embedding_scale",
        ):
            del c[ours]
        nested = {key: c.pop(key) for key in ("mask_token_id", "target_layer_ids")}
        c |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": nested}
        (out / "config.json").write_text(json.dumps(c, indent=2) + "\n")


def measure(target: Path, draft: Path, prompts: list[list[int]]) -> dict:
    """Acceptance on held-out prompts, through a built engine: mean length and share accepted at each position."""
    with tempfile.TemporaryDirectory() as scratch:
        build(BuildOptions(str(target), str(draft), Path(scratch) / "engine", max_seq_len=512))
        engine = Engine.load(Path(scratch) / "engine")
        lengths = [n for p in prompts for n in engine.generate([p], ANSWER)[0].acceptance_lengths]
    return {
        "acceptance_length": round(sum(lengths) / len(lengths), 3),
        "acceptance_by_position": [
            round(sum(n > r for n in lengths) / len(lengths), 3) for r in range(1, WIDTH)
        ],
        "steps": len(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write target/, dflash/, causal-depth/ into"
    )
    parser.add_argument("--target-steps", type=int, default=250)
    parser.add_argument("--draft-steps", type=int, default=400)
    parser.add_argument(
        "--sequences", type=int, default=4096, help="greedy continuations the drafts learn from"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    texts = [topics[name] for name in sorted(topics)]
    held_out = texts[::20]
    kept = [text for i, text in enumerate(texts) if i % 20]
    tokenizer = make_tokenizer(kept)
    tokenizer.save_pretrained(options.out / "target")
    eos, mask = tokenizer.convert_tokens_to_ids(SPECIAL[:2])
    stream = torch.tensor([t for text in kept for t in [*tokenizer.encode(text), eos]])
    print(f"{len(kept)} topics, {len(stream)} tokens; {len(held_out)} topics held out")
    target = train_target(stream, eos, options.target_steps, options.out / "target")
    sequences = continuations(target, stream, options.sequences)
    prompts = [
        ids[at : at + PROMPT]
        for text in held_out
        if len(ids := tokenizer.encode(text)) > 200
        for at in (0, 100)
    ][:24]
    figures = {}
    for family in ("dflash", "causal-depth"):
        draft = train_draft(target, sequences, family, mask, options.draft_steps, options.seed)
        save(draft, family, options.out / family)
        figures[family] = measure(options.out / "target", options.out / family, prompts)
        print(family, figures[family], flush=True)
    budget = {k: v for k, v in vars(options).items() if k != "out"}
    record = {
        **budget,
        "block_width": WIDTH,
        "held_out_prompts": len(prompts),
        "new_tokens": ANSWER,
        **figures,
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
