"""Drafts as their own packages write and compute them: the oracles of `test_references.py`.

Every class draws a random shape from a seed, saves a checkpoint with the reference package's own class, and restates
one decode step with that class's own modules, statelessly: all committed tokens go in again at every step, so that no
cache of ours or theirs can hide a wrong row. What is ours here is only the plumbing between their modules.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import tiny
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import DynamicCache

VOCABULARY = 9
MASK = 8


def randomise(model: torch.nn.Module, seed: int, std: float = 0.3) -> None:
    """Weights wide enough that proposals vary, norms near 1."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        norm = parameter.dim() == 1 and "norm" in name
        torch.nn.init.normal_(parameter, mean=float(norm), std=0.1 if norm else std)


def draw(seed: int) -> SimpleNamespace:
    """A shape: GQA ratio, head size, layers, taps out of order, block width."""
    r = random.Random(seed)
    heads = r.choice([2, 4])
    layers, target_layers = r.choice([1, 2, 3, 5] if seed % 5 == 0 else [1, 2]), r.choice([2, 3])
    taps = r.sample(range(target_layers - 1), r.choice([1, target_layers - 1]))
    return SimpleNamespace(
        random=r, hidden=r.choice([16, 32]), heads=heads, kv_heads=r.choice([h for h in (1, 2, 4) if heads % h == 0]),
        head_dim=r.choice([8, 16, 24]), layers=layers, target_layers=target_layers, taps=taps, width=r.choice([2, 3, 4, 5, 8, 16]),
    )  # fmt: skip


def save_target(path: Path, shape: SimpleNamespace, seed: int) -> Path:
    return tiny.save_target(
        path, "qwen3" if seed % 2 else "llama", seed=seed, vocab_size=VOCABULARY, hidden_size=shape.hidden, num_hidden_layers=shape.target_layers,
        head_dim=8, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip


def layer_config(shape: SimpleNamespace, kind=Qwen3Config, **more):
    return kind(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate_size=2 * shape.hidden, vocab_size=VOCABULARY, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, attn_implementation="eager", **more,
    )  # fmt: skip


def additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]


def block_mask(context: int, rows: int, causal: bool, window: int | None) -> torch.Tensor:
    """[R, context + R]: which keys the block's rows see."""
    q, k = context + torch.arange(rows)[:, None], torch.arange(context + rows)[None]
    visible = (k <= q) if causal else torch.ones(rows, context + rows, dtype=torch.bool)
    if window is not None:
        visible = visible & (q - k < window)
        if not causal:
            visible = visible & (k - q < window)
    return visible


class BlockReference:
    """The parallel family through a reference class's `fc`, `hidden_norm`, `layers`, `rotary_emb` and `norm`."""

    layout = "in_place"

    def __init__(self, seed: int):
        self.shape, self.seed = draw(seed), seed
        self.width = self.shape.width
        self.causal, self.windows = [False] * self.shape.layers, [None] * self.shape.layers

    def save(self, path: Path, target: Path) -> None:
        raise NotImplementedError

    def rows(self) -> int:
        return self.width - 1 if self.layout == "anchor_first" else self.width

    def write(self, path: Path, config: dict) -> None:
        path.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in self.model.state_dict().items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))

    def layer_context(self, mask, positions):
        return dict(attention_mask=mask, position_embeddings=positions)

    def block_hidden(self, features: torch.Tensor, anchor: int, embedding: torch.Tensor) -> torch.Tensor:
        """[1, R, H]"""
        rows, model, context = self.rows(), self.model, features.shape[1]
        x = F.embedding(torch.tensor([[anchor] + [MASK] * (rows - 1)]), embedding)
        f = model.hidden_norm(model.fc(features))
        positions = model.rotary_emb(x, torch.arange(context + rows)[None])
        for layer, causal, window in zip(model.layers, self.causal, self.windows, strict=True):
            mask = additive(block_mask(context, rows, causal, window))
            x = layer(
                hidden_states=x, **{self.context_name: f}, attention_mask=mask, position_embeddings=positions
            )
        return model.norm(x)

    context_name = "target_hidden"

    @property
    def predicting(self) -> slice:
        first = 1 if self.layout == "in_place" else 0
        return slice(first, first + self.width - 1)

    def features(self, states: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([states[i + 1] for i in self.shape.taps], -1)

    def propose(self, states, tokens: list[int], anchor: int, embedding, head) -> list[int]:
        hidden = self.block_hidden(self.features(states), anchor, embedding)
        return self.choose(hidden, F.linear(hidden, head), tokens, anchor, embedding)

    def choose(self, hidden, logits, tokens, anchor, embedding) -> list[int]:
        return logits[0, self.predicting].argmax(-1).tolist()

    def nested_config(self, architecture: str, **nested) -> dict:
        layers = layer_config(self.shape).to_dict()
        block = {"target_layer_ids": self.shape.taps, "mask_token_id": MASK, "block_size": self.width}
        return layers | {
            "architectures": [architecture],
            "num_target_layers": self.shape.target_layers,
            "dflash_config": block | nested,
        }


class ZlabDFlash(BlockReference):
    architecture, class_name = "DFlashDraftModel", "DFlashDraftModel"

    def extra(self) -> dict:
        return {}

    def save(self, path, target):
        from dflash import model as reference

        config = self.nested_config(self.architecture, **self.extra())
        if self.seed % 3 == 1:
            window = self.shape.random.choice([4, 9])
            sliding = [i % 2 == 0 for i in range(self.shape.layers)]
            config |= {
                "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
                "sliding_window": window,
                "use_sliding_window": True,
            }
            self.windows = [window if s else None for s in sliding]
            self.causal = sliding
        if self.seed % 3 != 0 and self.seed % 4 < 2:
            config["is_causal"] = bool(self.seed % 2)
            self.causal = [config["is_causal"]] * self.shape.layers
        self.model = getattr(reference, self.class_name)(
            Qwen3Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
        ).eval()
        randomise(self.model, self.seed)
        self.write(path, config)

    def choose(self, hidden, logits, tokens, anchor, embedding):
        rows = self.model.compute_logits(hidden, lambda h: logits)
        return super().choose(hidden, rows, tokens, anchor, embedding)


class ZlabDFlash2(ZlabDFlash):
    architecture, class_name = "DFlash2DraftModel", "DFlash2DraftModel"

    def extra(self):
        r = self.shape.random
        return {
            "conv_kernel_size": r.choice([k for k in (1, 2, 3) if k <= self.width]), "conv_group_size": r.choice([4, 8]),
            "selector_rank": r.choice([3, 6]), "selector_top_k": r.choice([2, 4, VOCABULARY]), "output_multiplier": r.choice([1.0, 0.7]),
            "final_logit_softcapping": r.choice([None, 5.0]),
        }  # fmt: skip

    def write(self, path, config):
        super().write(path, config)
        if self.seed % 2:  # as published: bare parameters, which the class loads into its embeddings
            state = self.model.state_dict()
            bare = {
                k.removesuffix(".weight") if "codebook" in k else k: v.contiguous() for k, v in state.items()
            }
            save_file(bare, path / "model.safetensors")

    def choose(self, hidden, logits, tokens, anchor, embedding):
        rows = hidden[:, self.predicting]
        return self.model.propose(rows, torch.tensor([anchor]), lambda h: logits[:, self.predicting], 0.0)[0][
            0
        ].tolist()


class JetSpec(ZlabDFlash):
    """JetSpec's head is DFlash's with an in-block causal mask in every layer; z-lab's class computes it with `is_causal`."""

    def save(self, path, target):
        from dflash import model as reference

        config = self.nested_config("DFlashDraftModel", causal_head=True)
        config["dflash_config"]["target_hidden_size"] = self.shape.hidden
        self.causal = [True] * self.shape.layers
        self.model = reference.DFlashDraftModel(
            Qwen3Config(
                **{k: v for k, v in config.items() if k not in ("architectures", "model_type")},
                is_causal=True,
            )
        ).eval()
        randomise(self.model, self.seed)
        self.write(path, config)


class SpecForge(BlockReference):
    def build(self, module: str, name: str, config: dict):
        import importlib
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = importlib.import_module(f"specforge.modeling.draft.{module}")
        self.model = getattr(reference, name)(
            Qwen3Config(
                **{k: v for k, v in config.items() if k not in ("architectures", "model_type")},
                attn_implementation="eager",
            )
        ).eval()
        randomise(self.model, self.seed)
        return reference


class SpecForgeDFlash(SpecForge):
    def save(self, path, target):
        config = self.nested_config("DFlashDraftModel")
        config["block_size"] = config["dflash_config"].pop("block_size")
        if self.seed % 2:
            config |= {
                "layer_types": ["sliding_attention"] * self.shape.layers,
                "sliding_window": 7,
                "use_sliding_window": True,
            }
            self.windows, self.causal = [7] * self.shape.layers, [True] * self.shape.layers
        self.build("dflash", "DFlashDraftModel", config)
        self.write(path, config)


class SpecForgeDomino(SpecForge):
    def save(self, path, target):
        shifted = bool(self.seed % 2)
        self.layout = "anchor_first_full" if shifted else "in_place"
        prefix = self.shape.random.choice([0, 1])
        config = self.nested_config(
            "DFlashDraftModel", projector_type="domino", gru_hidden_dim=self.shape.random.choice([6, 10]), emb_dim=self.shape.random.choice([5, 12]),
            pure_draft_prefix_len=prefix, shift_label=shifted,
        )  # fmt: skip
        config["block_size"] = config["dflash_config"].pop("block_size")
        self.build("domino", "DominoDraftModel", config)
        self.write(path, config)
        if self.seed % 3 == 0:  # early checkpoints kept the head below `logit_head`
            state = self.model.state_dict()
            early = {
                f"logit_head.{k}" if k.startswith(("prefix_gru", "embed_proj")) else k: v.contiguous()
                for k, v in state.items()
            }
            save_file(early, path / "model.safetensors")

    def choose(self, hidden, logits, tokens, anchor, embedding):
        target = SimpleNamespace(
            lm_head=lambda h: logits,
            model=SimpleNamespace(embed_tokens=lambda ids: F.embedding(ids, embedding)),
        )
        block = torch.tensor([[anchor] + [MASK] * (self.width - 1)])
        return self.model._sample_draft_tokens(target, hidden, block)[0].tolist()


class MarkovMixin:
    """The heads of SpecForge, whose own loop takes other rows than it trains (methods.md): rows from us, heads from them."""

    def choose(self, hidden, logits, tokens, anchor, embedding):
        rows, base = hidden[:, self.predicting], logits[:, self.predicting]
        if self.model.markov_head is None:
            chosen = base.argmax(-1)
        else:
            chosen, _ = self.model.markov_head.sample_block_tokens(
                base, first_prev_token_ids=torch.tensor([anchor]), hidden_states=rows
            )
        previous = torch.cat([torch.tensor([[anchor]]), chosen[:, :-1]], 1)
        confidence = self.model.predict_confidence(rows, prev_token_ids=previous)
        self.confidence = None if confidence is None else torch.sigmoid(confidence)[0].tolist()
        return chosen[0].tolist()


class SpecForgeDSpark(MarkovMixin, SpecForge):
    layout = "anchor_first"

    def save(self, path, target):
        heads = ("vanilla", "gated", "rnn")
        config = self.nested_config(
            "DSparkDraftModel", projector_type="dspark", markov_rank=self.shape.random.choice([4, 7]), markov_head_type=heads[self.seed % 3],
            enable_confidence_head=self.seed % 4 > 0, confidence_head_with_markov=self.seed % 4 == 2,
            attention_mode="mha" if self.shape.heads == self.shape.kv_heads else "gqa",
        )  # fmt: skip
        config["block_size"] = config["dflash_config"].pop("block_size") - 1
        if self.seed % 5 == 4:
            config["sample_from_anchor"], self.layout = False, "in_place"
        self.build("dspark", "DSparkDraftModel", config)
        self.write(path, config)


class DeepSpec(MarkovMixin, SpecForge):
    """DeepSpec's files: its keys at the top level, frozen copies of the target's tables, SpecForge's modules inside."""

    layout = "anchor_first"

    def save(self, path, target):
        rank = 0 if self.seed % 3 == 0 else 5
        inner = self.nested_config(
            "DSparkDraftModel",
            projector_type="dspark",
            markov_rank=rank,
            attention_mode="mha" if self.shape.heads == self.shape.kv_heads else "gqa",
        )
        inner["block_size"] = inner["dflash_config"].pop("block_size") - 1
        self.build("dspark", "DSparkDraftModel", inner)
        self.shape.taps[0] = -1 if self.seed % 2 else self.shape.taps[0]
        config = {k: v for k, v in inner.items() if k != "dflash_config"} | {
            "architectures": ["Qwen3DSparkModel"], "target_layer_ids": self.shape.taps, "mask_token_id": MASK, "num_anchors": 512,
            "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": False, "tie_word_embeddings": False,
        }  # fmt: skip
        self.write(path, config)
        from safetensors.torch import load_file

        tables, state = load_file(target / "model.safetensors"), self.model.state_dict()
        state["embed_tokens.weight"] = tables["model.embed_tokens.weight"]
        state["lm_head.weight"] = tables.get("lm_head.weight", tables["model.embed_tokens.weight"])
        save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors")


class Speculators(BlockReference):
    kind, config_name, model_name = "dflash", "DFlashSpeculatorConfig", "DFlashDraftModel"
    may_reduce = True

    def knobs(self) -> dict:
        return {}

    def tokens_proposed(self, block: int, sampled: bool) -> int:
        return block if sampled else block - 1

    def save(self, path, target):
        import importlib

        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        package = importlib.import_module(f"speculators.models.{self.kind}")
        core = importlib.import_module(f"speculators.models.{self.kind}.core")
        knobs = self.knobs()
        sampled = bool(self.seed % 2) if self.kind != "dflash2" else False
        self.layout = "anchor_first" if sampled else "in_place"
        block = self.width - 1 if sampled else self.width
        more = {}
        if self.seed % 3 == 1:
            more = {
                "layer_types": ["sliding_attention"] * self.shape.layers,
                "sliding_window": 6,
                "use_sliding_window": True,
            }
            self.windows = [6] * self.shape.layers
            non_causal = bool(self.seed % 2) or self.kind == "dflash2"
            self.causal = [not non_causal] * self.shape.layers
            knobs["sliding_window_non_causal"] = non_causal
        self.reduced = self.may_reduce and self.seed % 4 == 3
        config = getattr(package, self.config_name)(
            transformer_layer_config=layer_config(self.shape, **more), draft_vocab_size=5 if self.reduced else VOCABULARY, block_size=block,
            aux_hidden_state_layer_ids=[i + 1 for i in self.shape.taps], mask_token_id=MASK, sample_from_anchor=sampled,
            speculators_config=SpeculatorsConfig(
                algorithm=self.kind, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=self.width - 1)],
                default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=str(target), architectures=["X"]),
            ), **knobs,
        )  # fmt: skip
        config.transformer_layer_config._attn_implementation = "eager"
        self.model = getattr(core, self.model_name)(config).eval()
        randomise(self.model, self.seed)
        if self.reduced:
            known = torch.tensor([0, 2, 3, 6, 7])
            t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
            t2d[known] = True
            self.model.load_vocab_mappings(t2d, known - torch.arange(5))
        self.model.load_verifier_weights()
        if self.reduced:
            torch.nn.init.normal_(self.model.lm_head.weight, std=0.3)
        self.model.save_pretrained(path)

    def target_ids(self, index: torch.Tensor) -> torch.Tensor:
        return index + self.model.d2t[index] if self.reduced else index

    def propose(self, states, tokens, anchor, embedding, head):
        hidden = self.block_hidden(self.features(states), anchor, self.model.embed_tokens.weight)
        return self.choose(hidden, self.model.lm_head(hidden), tokens, anchor, embedding)

    def choose(self, hidden, logits, tokens, anchor, embedding):
        return self.target_ids(logits[0, self.predicting].argmax(-1)).tolist()


class SpeculatorsDFlash2(Speculators):
    kind, config_name, model_name, may_reduce = (
        "dflash2",
        "DFlash2SpeculatorConfig",
        "DFlash2DraftModel",
        False,
    )

    def knobs(self):
        r = self.shape.random
        return {
            "conv_kernel_size": 2,
            "conv_group_size": r.choice([4, 8]),
            "selector_rank": r.choice([3, 6]),
            "selector_top_k": r.choice([2, 4]),
        }

    def choose(self, hidden, logits, tokens, anchor, embedding):
        prev, chosen = torch.tensor([anchor]), []
        for row in range(*self.predicting.indices(hidden.shape[1])):
            candidates, scores = self.model.candidate_selector.select(logits[:, row], hidden[:, row], prev)
            prev = candidates.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
            chosen.append(prev.item())
        return chosen


class SpeculatorsDSpark(Speculators):
    kind, config_name, model_name = "dspark", "DSparkSpeculatorConfig", "DSparkDraftModel"

    def knobs(self):
        r = self.shape.random
        return {
            "markov_rank": r.choice([4, 7]), "markov_head_type": ("vanilla", "gated", "rnn")[self.seed % 3],
            "enable_confidence_head": bool(self.seed % 4), "confidence_head_with_markov": self.seed % 4 == 2,
        }  # fmt: skip

    def choose(self, hidden, logits, tokens, anchor, embedding):
        """Their training head takes the tokens before all at once; a walk asks it again with each token chosen."""
        rows, base, head = hidden[:, self.predicting], logits[:, self.predicting], self.model.markov_head
        previous = torch.full(base.shape[:2], anchor)
        for row in range(base.shape[1]):
            bias = head.block_bias(prev_token_ids=previous, hidden_states=rows)
            token = self.target_ids((base + bias)[0, row].argmax(-1))
            if row + 1 < base.shape[1]:
                previous[0, row + 1] = token
            else:
                last = token
        self.confidence = None
        if self.model.confidence_head is not None:
            parts = [rows] + (
                [head.prev_embeddings(previous)] if self.model.config.confidence_head_with_markov else []
            )
            self.confidence = torch.sigmoid(self.model.confidence_head(torch.cat(parts, -1)))[0].tolist()
        return [*previous[0, 1:].tolist(), last.item()]


class SpeculatorsXPress(Speculators):
    kind, config_name, model_name = "xpress", "XPressSpeculatorConfig", "XPressDraftModel"

    def knobs(self):
        return {
            "xpress_rank": self.shape.random.choice([4, 7]),
            "xpress_mlp_ratio": 2,
            "num_jacobi_passes": self.shape.random.choice([1, 3, 6]),
        }

    def choose(self, hidden, logits, tokens, anchor, embedding):
        refiner, passes = self.model.refiner_head, self.model.config.num_jacobi_passes
        cache = refiner.hidden_cache(hidden)
        chosen = self.target_ids(logits.argmax(-1))
        for _ in range(passes):
            if self.layout == "in_place":
                chosen[:, :1] = anchor
                previous = torch.cat([torch.tensor([[tokens[-1]]]), chosen[:, :-1]], 1)
            else:
                previous = torch.cat([torch.tensor([[anchor]]), chosen[:, :-1]], 1)
            chosen = self.target_ids((logits + refiner.block_bias(previous, hcache=cache)).argmax(-1))
        return chosen[0, self.predicting].tolist()


class Eagle3(BlockReference):
    """The chain, recomputed over all rows at every link."""

    def features(self, states):
        return torch.cat([states[i] for i in self.taps], -1)

    def link(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Features and the tokens after them, of all rows -> hidden states of all rows before the last norm."""
        raise NotImplementedError

    def read(self, hidden: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The last row's hidden state -> its token and the feature it feeds."""
        raise NotImplementedError

    def propose(self, states, tokens, anchor, embedding, head):
        features = self.project(self.features(states))
        following, proposals = [*tokens[1:], anchor], []
        for _ in range(self.width - 1):
            hidden = self.link(features, torch.tensor([following]))
            token, feature = self.read(hidden[:, -1:])
            proposals.append(token)
            features, following = torch.cat([features, feature], 1), [*following, token]
        return proposals


class SpecForgeEagle3(Eagle3):
    """SGLang's and SpecForge's layout: `midlayer`, one layer, three taps."""

    def save(self, path, target):
        import importlib
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = importlib.import_module("specforge.modeling.draft.llama3_eagle")
        self.shape.layers = 1
        ids = [self.shape.random.randrange(self.shape.target_layers - 1) for _ in range(3)]
        self.taps = [i + 1 for i in ids]
        self.reduced = self.seed % 2 == 1
        kind = dict(
            draft_vocab_size=5 if self.reduced else VOCABULARY, pad_token_id=0, fc_norm=self.seed % 3 == 0
        )
        config = layer_config(self.shape, LlamaConfig, **kind)
        self.model = reference.LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval()
        randomise(self.model, self.seed)
        if self.reduced:
            known = torch.tensor([0, 2, 3, 6, 7])
            self.model.d2t = known - torch.arange(5)
            self.model.t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
            self.model.t2d[known] = True
        raw = config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        }
        self.write(path, raw)
        state = {k: v.contiguous() for k, v in self.model.state_dict().items()}
        if self.seed % 4 == 1:
            state = {k.replace("midlayer.", "layers.0."): v for k, v in state.items()}
        save_file(state, path / "model.safetensors")

    def project(self, features):
        return self.model.project_hidden_states(features)

    def link(self, features, tokens):
        rows = features.shape[1]
        visible = torch.ones(rows, rows, dtype=torch.bool).tril()
        return self.model.midlayer(
            input_emb=self.model.embed_tokens(tokens), hidden_states=features, cache_hidden=None, attention_mask=additive(visible),
            position_ids=torch.arange(rows)[None],
        )  # fmt: skip

    def read(self, hidden):
        index = self.model.compute_logits(hidden)[0, 0].argmax()
        return (index + self.model.d2t[index]).item(), hidden


class SpeculatorsEagle3(Eagle3):
    def save(self, path, target):
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3SpeculatorConfig
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        self.taps = self.shape.random.sample(range(self.shape.target_layers), 2)
        self.reduced = self.seed % 4 == 3
        more = {}
        if self.seed % 5 == 2:
            more = {
                "layer_types": ["sliding_attention"] * self.shape.layers,
                "sliding_window": 6,
                "use_sliding_window": True,
            }
        kind = LlamaConfig if self.seed % 2 and not more else Qwen3Config
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer_config(self.shape, kind, **more), draft_vocab_size=5 if self.reduced else VOCABULARY,
            norm_before_residual=bool(self.seed % 3), eagle_aux_hidden_state_layer_ids=self.taps, norm_before_fc=self.seed % 4 == 1,
            fc_norm=self.seed % 4 == 2, norm_output=self.seed % 5 == 1,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=self.width - 1)], default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=str(target), architectures=["X"]),
            ),
        )  # fmt: skip
        config.transformer_layer_config._attn_implementation = "eager"
        self.window = 6 if more else None
        self.model = Eagle3DraftModel(config).eval()
        randomise(self.model, self.seed)
        if self.reduced:
            known = torch.tensor([0, 2, 3, 6, 7])
            t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
            t2d[known] = True
            self.model.load_vocab_mappings(t2d, known - torch.arange(5))
        self.model.save_pretrained(path)

    def project(self, features):
        if self.model.input_norm is not None:
            features = self.model.input_norm(features)
        if self.model.fc_norm is not None:
            parts = features.chunk(len(self.model.fc_norm), dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.model.fc_norm, parts, strict=True)], -1
            )
        return self.model.fc(features)

    def link(self, features, tokens):
        rows = features.shape[1]
        x = torch.cat([self.model.embed_tokens(tokens), features], -1)
        positions = 1 + torch.arange(rows)[None]
        mask = additive(block_mask(0, rows, True, self.window))
        embeddings = self.model.rotary_emb(x, positions)
        cache = DynamicCache()
        for layer in self.model.layers:
            x = layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                position_embeddings=embeddings,
            )
        return x

    def read(self, hidden):
        normed = self.model.norm(hidden)
        index = self.model.lm_head(normed)[0, 0].argmax()
        token = (index + self.model.d2t[index]).item() if self.reduced else index.item()
        return token, normed if self.model.config.norm_output else hidden


FAMILIES = {
    "z-lab DFlash": ZlabDFlash,
    "z-lab DFlash 2": ZlabDFlash2,
    "JetSpec": JetSpec,
    "SpecForge DFlash": SpecForgeDFlash,
    "SpecForge Domino": SpecForgeDomino,
    "SpecForge DSpark": SpecForgeDSpark,
    "DeepSpec": DeepSpec,
    "speculators dflash": Speculators,
    "speculators dflash2": SpeculatorsDFlash2,
    "speculators dspark": SpeculatorsDSpark,
    "speculators xpress": SpeculatorsXPress,
    "EAGLE-3": SpecForgeEagle3,
    "speculators eagle3": SpeculatorsEagle3,
}
