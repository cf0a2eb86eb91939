"""Makes the tiny pair: a target of four layers and three drafts for it, from text that ships with Python.

    python samples/tiny/make.py --out samples/tiny        (about 15 minutes on two cores)

The text is Python's own help (`pydoc_data.topics`); every twentieth topic is held out. The target is a Llama of a
million parameters. The drafts (EAGLE-3, DFlash, causal-depth) learn from the target's own greedy continuations, with the
same sequences, steps, batches and seed; `compare.py` measures what came of it.
"""

import argparse
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from train import FAMILIES, PROMPT, WIDTH, progress, save, schedule, train_draft
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY, CONTEXT = 1024, 256
ANSWER = (
    96  # tokens the target adds to a prompt of PROMPT tokens of the text: a sequence the drafts learn from
)
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


def train_target(stream: torch.Tensor, eos: int, steps: int, out: Path) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write the target and the drafts into"
    )
    parser.add_argument(
        "--keep-target", action="store_true", help="train drafts for the target that is there already"
    )
    parser.add_argument("--target-steps", type=int, default=250)
    parser.add_argument("--draft-steps", type=int, default=400)
    parser.add_argument(
        "--sequences", type=int, default=4096, help="greedy continuations the drafts learn from"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    kept = [topics[name] for i, name in enumerate(sorted(topics)) if i % 20]
    if options.keep_target:
        tokenizer = AutoTokenizer.from_pretrained(options.out / "target")
    else:
        tokenizer = make_tokenizer(kept)
        tokenizer.save_pretrained(options.out / "target")
    eos, mask = tokenizer.convert_tokens_to_ids(SPECIAL[:2])
    stream = torch.tensor([t for text in kept for t in [*tokenizer.encode(text), eos]])
    print(f"{len(kept)} topics of {len(topics)}, {len(stream)} tokens")
    if not options.keep_target:
        train_target(stream, eos, options.target_steps, options.out / "target")
    # What the file holds, not what was trained: the drafts must fit the rounded weights.
    target = AutoModelForCausalLM.from_pretrained(options.out / "target", dtype=torch.float32)
    target.eval().requires_grad_(False)
    torch.manual_seed(options.seed)
    sequences = continuations(target, stream, options.sequences)
    record = {k: v for k, v in vars(options).items() if k not in ("out", "keep_target")} | {
        "block_width": WIDTH
    }
    for family in FAMILIES:
        draft = train_draft(target, sequences, family, mask, options.draft_steps, options.seed)
        save(draft, options.out / family)
        own = sum(p.numel() for p in draft.parameters() if p.requires_grad)
        record[family] = {"parameters": own}
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
