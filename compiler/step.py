"""The step: one graph that verifies the last proposals and proposes the next ones.

One idea makes it serve prefill, chunked prefill, verification and any mix of them in a batch: *a prompt is a
draft that is always right*. Every sequence hands in some tokens, of which the first `num_known` are given (a
prompt chunk: all of them; a decode block: one, the anchor) and the rest are proposals to verify.

B sequences, S rows this step (K in decoding, a chunk in prefill), K block width, C cache capacity.
"""

import torch
from torch import nn

from speccompile.compiler.sampling import log_probabilities, sample
from speccompile.compiler.stages import Stage


def take_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """values [B, S, N], rows [B, K] int64 -> [B, K, N]"""
    return values.gather(1, rows[:, :, None].expand(-1, -1, values.shape[2]))


class Step(nn.Module):
    """Verify-and-propose, greedy or sampled. Without draft stages and with width 1 it is plain decoding, one row a step.

    Inputs: `tokens` [B, S] left-aligned, `num_tokens` [B] how many are real, `num_known` [B] how many are given,
    `lengths` [B] committed tokens already cached (all int64); for a chain draft `next_tokens` [B], the token after the
    last known one where it is given too (a prompt chunk that is not the last), else -1; with `sampling` what
    `sampling.sample` takes; the target's and the draft's caches, a flat list of key, value, key, value, … [B, Hkv, C, D].

    Outputs: `emitted` [B, K] and `num_emitted` [B], the target's choices after the last known row (accepted
    proposals, then the bonus token); `new_lengths` [B] = lengths + num_known + accepted; with `sampling` what
    `sampling.log_probabilities` returns; with a draft `block`
    [B, K], the next anchor and its proposals; `confidence` [B, K-1] where the draft predicts it, and `num_proposed` [B]
    if `threshold` cuts the block at the first proposal less confident; then all caches.
    """

    def __init__(
        self,
        width: int,
        target: Stage,
        inject: Stage | None = None,
        propose: Stage | None = None,
        chain: bool = False,
        confident: bool = False,
        threshold: float | None = None,
        sampling: bool = False,
    ):
        super().__init__()
        self.width, self.target, self.inject, self.propose = width, target, inject, propose
        self.chain, self.confident, self.threshold, self.sampling = chain, confident, threshold, sampling

    def forward(
        self,
        tokens: torch.Tensor,
        num_tokens: torch.Tensor,
        num_known: torch.Tensor,
        lengths: torch.Tensor,
        target_caches: list[torch.Tensor],
        draft_caches: list[torch.Tensor],
        extra: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        next_tokens = extra[0] if self.chain else None
        # Verify: one target pass over all rows; the choice after the last known row, and after each proposal.
        logits, *target_outputs = self.target(tokens, lengths, *target_caches)
        features, target_caches = target_outputs[: -len(target_caches)], target_outputs[-len(target_caches) :]
        rows = num_known[:, None] - 1 + torch.arange(self.width, device=tokens.device)  # [B, K]
        rows = rows.clamp(min=0).clamp(max=tokens.shape[1] - 1)
        logits = take_rows(logits, rows)
        choices = sample(logits, *extra[-5:]) if self.sampling else logits.argmax(-1)  # [B, K]

        # Accept: proposals count until the first one that is not the target's own choice, or draw.
        proposals = tokens.gather(1, rows[:, 1:])  # [B, K-1]: row num_known holds the first proposal
        is_proposal = (
            num_known[:, None] + torch.arange(self.width - 1, device=tokens.device) < num_tokens[:, None]
        )
        wrong = torch.logical_or(proposals != choices[:, :-1], ~is_proposal)
        accepted = (wrong.to(torch.int64).cumsum(1) == 0).to(torch.int64).sum(1)  # [B]
        new_lengths = lengths + num_known + accepted
        anchor = choices.gather(1, accepted[:, None])[:, 0]  # the bonus token opens the next block
        verified = [choices, accepted + 1, new_lengths]
        if self.sampling:
            verified += log_probabilities(logits, choices)
        if self.propose is None:
            return *verified, *target_caches

        # Inject: every row's tapped features become context in the draft's caches; rows past the accepted ones
        # are overwritten below or masked by length. A chain's rows are also given the token after each.
        last = num_known - 1 + accepted  # [B] the last committed row
        if self.chain:
            given = torch.where(next_tokens < 0, anchor, next_tokens)
            following = torch.cat([tokens[:, 1:], anchor[:, None]], dim=1)
            is_last = torch.arange(tokens.shape[1], device=tokens.device) == last[:, None]
            following = torch.where(is_last, given[:, None], following)
            hidden, *draft_caches = self.inject(*features, following, last, lengths, *draft_caches)
            proposed = self.propose(hidden, new_lengths, *draft_caches)
        else:
            draft_caches = self.inject(*features, lengths, *draft_caches)
            # Propose: one pass over [anchor, MASK, ...] at the positions after the committed tokens.
            before = tokens.gather(1, last.clamp(min=0)[:, None])[:, 0]
            proposed = self.propose(anchor, before, new_lengths, *draft_caches)
        proposals, *rest = proposed
        small = [torch.cat([anchor[:, None], proposals], dim=1)]
        if self.confident:
            confidence, *rest = rest
            small.append(confidence)
            if self.threshold is not None:
                small.append(
                    ((confidence < self.threshold).to(torch.int64).cumsum(1) == 0).to(torch.int64).sum(1)
                )
        return *verified, *small, *target_caches, *rest
