"""Heads that correct a row's logits by the token before it.

All but xPress's have one form: with U_r the base logits of row r and c a candidate token,

    score_r(c) = U_r(c) + <z_r, readout[c]>,    proposal_r = argmax_c score_r(c)

where the latent z_r depends on the token chosen before (the anchor, for the first) and on the row's hidden state:

    Markov, vanilla   z = w1[prev]                                                     DSpark, arXiv 2607.05147
    Markov, gated     z = sigmoid(G [h; w1[prev]]) * w1[prev]
    Markov, rnn       g, c, o = J [s; w1[prev]; h];  s' = sigmoid(g) s + (1-sigmoid(g)) tanh(c);  z = tanh(o)
    GRU               s' = GRU(embedding[prev], s);  z = silu(E1 [h; s'])               Domino, arXiv 2605.29707
    selector          z = predecessor[prev] * (W h)                                     DFlash 2

They run one after the other, row by row, unrolled in the graph: over the whole vocabulary, or over each row's best
`head_candidates` tokens. B sequences, P proposals, H hidden size, R latent size, V head rows, N candidates.
"""

import torch
from torch import nn
from torch.nn import functional as F

from speccompile.compiler.drafts.config import DraftConfig
from speccompile.compiler.drafts.parts import Draft


class SerialHead(nn.Module):
    """The walk; subclasses give `start`, `latent` and `readout`."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config

    def readout(self) -> torch.Tensor:
        """[V, R]"""
        raise NotImplementedError

    def start(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Hidden states [B, P, H] -> the state before the first row, [B, …] or None."""
        return None

    def latent(self, draft: Draft, prev: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None):
        """prev [B], one row's hidden [B, H], state -> z [B, R], next state"""
        raise NotImplementedError

    def propose(
        self, draft: Draft, hidden: torch.Tensor, anchor: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """hidden [B, P, H], anchor [B] -> proposals [B, P]"""
        base, candidates, readout = draft.logits(hidden), None, self.readout()
        if self.config.head_candidates is not None:
            base, candidates = base.topk(self.config.head_candidates, dim=-1)  # [B, P, N] both
        prev, state, proposals = anchor, self.start(hidden), []
        for row in range(hidden.shape[1]):
            z, state = self.latent(draft, prev, hidden[:, row], state)
            scores = base[:, row]
            if row >= self.config.head_prefix:
                if candidates is None:
                    scores = scores + F.linear(z, readout)
                else:
                    scores = scores + (readout[candidates[:, row]] @ z[:, :, None])[:, :, 0]
            index = scores.argmax(-1)
            if candidates is not None:
                index = candidates[:, row].gather(-1, index[:, None])[:, 0]
            prev = draft.token_ids(index)
            proposals.append(prev)
        return torch.stack(proposals, dim=1)


def _known(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Tokens that only pad the target's vocabulary have no row in a draft's table; they take its last."""
    return tokens.clamp(max=table.shape[0] - 1)


class MarkovHead(SerialHead):
    def __init__(self, config: DraftConfig):
        super().__init__(config)
        rank = config.head_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.head_rows, bias=False)
        if config.head == "markov_gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif config.head == "markov_rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def readout(self):
        return self.markov_w2.weight

    def start(self, hidden):
        return (
            hidden.new_zeros(hidden.shape[0], self.config.head_rank)
            if self.config.head == "markov_rnn"
            else None
        )

    def previous(self, tokens: torch.Tensor) -> torch.Tensor:
        """The learned embedding of the tokens before, [..., R]."""
        return self.markov_w1(_known(tokens, self.markov_w1.weight))

    def latent(self, draft, prev, hidden, state):
        w = self.previous(prev)
        if self.config.head == "markov":
            return w, None
        if self.config.head == "markov_gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, w], dim=-1))) * w, None
        gate, candidate, out = self.joint_proj(torch.cat([state, w, hidden], dim=-1)).chunk(3, dim=-1)
        candidate = torch.tanh(candidate)
        return torch.tanh(out), candidate + torch.sigmoid(gate) * (state - candidate)


class DominoHead(SerialHead):
    def __init__(self, config: DraftConfig):
        super().__init__(config)
        size, state = config.hidden_size, config.head_state_size
        self.prefix_gru = nn.Module()
        self.prefix_gru.weight_ih_l0 = nn.Parameter(torch.zeros(3 * state, size))
        self.prefix_gru.weight_hh_l0 = nn.Parameter(torch.zeros(3 * state, state))
        self.embed_proj = nn.Sequential(
            nn.Linear(size + state, config.head_rank, bias=False),
            nn.SiLU(),
            nn.Linear(config.head_rank, config.head_rows, bias=False),
        )

    def readout(self):
        return self.embed_proj[2].weight

    def start(self, hidden):
        return hidden.new_zeros(hidden.shape[0], self.config.head_state_size)

    def latent(self, draft, prev, hidden, state):
        """A GRU cell without biases, gates in PyTorch's order: reset, update, new."""
        x_reset, x_update, x_new = F.linear(draft.embed(prev), self.prefix_gru.weight_ih_l0).chunk(3, dim=-1)
        s_reset, s_update, s_new = F.linear(state, self.prefix_gru.weight_hh_l0).chunk(3, dim=-1)
        new = torch.tanh(x_new + torch.sigmoid(x_reset + s_reset) * s_new)
        update = torch.sigmoid(x_update + s_update)
        state = new + update * (state - new)
        return self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, state], dim=-1))), state


class CandidateSelector(SerialHead):
    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.head_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.head_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.head_rank, bias=False)

    def readout(self):
        return self.successor_codebook

    def latent(self, draft, prev, hidden, state):
        table = self.predecessor_codebook
        return F.embedding(_known(prev, table), table) * self.hidden_projection(hidden), None


class RefinerHead(nn.Module):
    """xPress (arXiv 2608.02438): a bias from the tokens before, refined in parallel (Jacobi) passes of constant depth.

    With a_r = W_in [down_h h_r; down_g mean(h); e(prev_r)] and M lower triangular in the block's rows,
    x_r = a_r + sum_{j<=r} M[:, r, j] a_j; x += SwiGLU(x); bias = readout x. A pass takes as `prev` what the pass before
    chose, moved by one row. Rows are the block's: in an in-place layout row 0 stands for the anchor, whose `prev` is
    the token before it.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        rank, hidden = config.head_rank, config.hidden_size
        rows = config.rows(config.block_width)
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h = nn.Linear(hidden, rank, bias=False)
        self.down_g = nn.Linear(hidden, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, rows, rows))
        self.mlp_gate = nn.Linear(rank, rank * config.head_mlp_ratio, bias=False)
        self.mlp_up = nn.Linear(rank, rank * config.head_mlp_ratio, bias=False)
        self.mlp_down = nn.Linear(rank * config.head_mlp_ratio, rank, bias=False)
        self.readout = nn.Linear(rank, config.head_rows, bias=False)

    def bias(self, features: torch.Tensor, prev: torch.Tensor) -> torch.Tensor:
        """features [B, R, 2r] of the hidden states, prev tokens [B, R] -> [B, R, V]"""
        embedded = self.token_embed(_known(prev, self.token_embed.weight))
        x = self.in_proj(torch.cat([features, embedded], dim=-1))
        x = x + (self.mix_l.tril() @ x.permute(2, 1, 0)).permute(2, 1, 0)  # [r, R, R] @ [r, R, B]
        x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
        return self.readout(x)

    def propose(
        self, draft: Draft, hidden: torch.Tensor, anchor: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """hidden [B, R, H] of all rows, anchor [B], the token before it [B] -> tokens of all rows [B, R]"""
        base = draft.logits(hidden)
        mean = hidden.mean(dim=1, keepdim=True).expand_as(hidden)
        features = torch.cat([self.down_h(hidden), self.down_g(mean)], dim=-1)
        chosen = draft.token_ids(base.argmax(-1))
        for _ in range(self.config.head_passes):
            if self.config.first_row:
                prev = torch.cat([before[:, None], anchor[:, None], chosen[:, 1:-1]], dim=1)
            else:
                prev = torch.cat([anchor[:, None], chosen[:, :-1]], dim=1)
            chosen = draft.token_ids((base + self.bias(features, prev)).argmax(-1))
        return chosen


class ConfidenceHead(nn.Module):
    """The probability that a proposal is accepted, from what is known before it: sigmoid(w [h; w1[prev]] + b)."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.proj = nn.Linear(
            config.hidden_size + (config.head_rank if config.confidence == "hidden_and_previous" else 0), 1
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[B, P, H (+R)] -> [B, P] float32"""
        return torch.sigmoid(self.proj(features)[..., 0].float())
