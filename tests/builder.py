"""Builds tiny pairs once per test session."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from speccompile.compiler import checkpoint
from speccompile.compiler.build import BuildOptions, build
from speccompile.compiler.drafts.loading import load_draft, resolve_draft
from speccompile.compiler.drafts.parts import Draft
from speccompile.runtime import Engine


@dataclass
class Pair:
    target_path: Path
    draft_path: Path
    engine: Engine
    report: dict[str, Any]
    target: PreTrainedModel
    draft: Draft


class Pairs:
    def __init__(self, root: Path):
        self.root = root
        self.built: dict[str, Pair] = {}

    def __call__(
        self,
        architecture: str = "llama",
        draft: dict | None = None,
        target: dict | None = None,
        **options: Any,
    ) -> Pair:
        key = repr(
            (
                architecture,
                sorted((draft or {}).items()),
                sorted((target or {}).items()),
                sorted(options.items()),
            )
        )
        if key not in self.built:
            self.built[key] = self._build(
                self.root / str(len(self.built)), architecture, draft or {}, target or {}, options
            )
        return self.built[key]

    def _build(self, root: Path, architecture: str, draft: dict, target: dict, options: dict) -> Pair:
        target_path = tiny.save_target(root / "target", architecture, **target)
        draft_path = tiny.save_draft(root / "draft", target_path, **draft)
        dtype = options.get("dtype", "float32")
        report = build(
            BuildOptions(str(target_path), str(draft_path), root / "engine", **{"max_seq_len": 64, **options})
        )
        config = checkpoint.target_config(target_path)
        model = checkpoint.load_target(target_path, config, dtype)
        module = load_draft(draft_path, resolve_draft(draft_path, config), dtype)
        module.lend(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        return Pair(target_path, draft_path, Engine.load(root / "engine", threads=1), report, model, module)


@torch.no_grad()
def eager_greedy(target: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """The oracle: greedy tokens of Transformers in eager mode, one row a step."""
    cache, feed, produced = DynamicCache(config=target.config), torch.tensor([prompt]), []
    for _ in range(tokens):
        produced.append(target(input_ids=feed, cache=cache, use_cache=True).logits[0, -1].argmax().item())
        feed = torch.tensor([produced[-1:]])
    return produced
