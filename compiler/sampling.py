"""Sampling inside the step: each row draws its token from the target's distribution with a uniform number that is an input.

Proposals are deterministic, so verifying them needs nothing else: a row's draw is compared with the proposal after it, as
the greedy choice is (accepting with probability p(x), and leaving the residual law where it differs: Leviathan et al.
2023, with a one-hot draft). The token at a position depends on the tokens before it and on that position's uniform number
alone, so speculation and plain decoding draw the same text from the same numbers.

The vocabulary is not sorted. Top-k takes the 256 likeliest tokens; for top-p two histograms over the log-probabilities, the
second within the first one's crossing bin, find the threshold to 8e-6 nats. Tokens closer than that stand and fall together.
"""

import torch

SAMPLING_INPUTS = ("temperature", "top_k", "top_p", "min_p", "uniforms")
LOG_PROBABILITY_OUTPUTS = ("logprobs", "top_tokens", "top_logprobs")
MOST_LOGPROBS = 20
MOST_TOP_K = 256
BINS = 2048
RANGE = 32.0
"""Nats below the likeliest token that bins tell apart; what lies lower has at most 1.3e-14 of its probability."""
BLOCK = 256
"""Tokens of the vocabulary whose weights are summed before the sums are: one sum over all would round too much off."""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Tokens [B, K] int64 for rows of logits [B, K, V].

    `temperature` [B] float32, 0 for the likeliest token; then, of the softmax at it, the `top_k` [B] int64 likeliest (0: all; at
    most MOST_TOP_K);
    of those the likeliest whose predecessors have less than `top_p` [B] of their mass; of those the ones with at least
    `min_p` [B] of the likeliest's probability. `uniforms` [B, K] float32 in [0, 1) pick by the inverse of the cumulative
    distribution in the vocabulary's order.
    """
    best = logits.argmax(-1)
    scores = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    likeliest = scores.topk(min(MOST_TOP_K, logits.shape[-1]), dim=-1).values
    gap = likeliest[..., :1] - scores  # [B, K, V], in nats
    rank = (top_k - 1).clamp(min=0, max=likeliest.shape[-1] - 1)[:, None, None]
    kth = likeliest.gather(-1, rank.expand(-1, scores.shape[1], -1))
    within_k = torch.where(top_k[:, None, None] > 0, likeliest[..., :1] - kth, torch.inf)
    weight = torch.exp(-gap) * (gap <= within_k)
    limit = torch.where(top_p < 1, top_p, torch.inf)[:, None, None] * weight.sum(-1, keepdim=True)
    kept = _within(gap * (BINS / RANGE), weight, limit)
    weight = weight * kept * (gap <= -torch.log(min_p)[:, None, None])
    return torch.where((temperature == 0)[:, None], best, _draw(weight, uniforms))


def log_probabilities(
    logits: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the choices [B, K] under the target's softmax at temperature 1: [B, K] float32; and its MOST_LOGPROBS likeliest tokens
    [B, K, 20] int64 with theirs."""
    scores = logits.float()
    total = scores.logsumexp(-1, keepdim=True)
    best = scores.topk(min(MOST_LOGPROBS, logits.shape[-1]), dim=-1)
    chosen = scores.gather(-1, choices[..., None]) - total
    return chosen[..., 0], best.indices, best.values - total


def _within(place: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Bool [B, K, V]: tokens before which, from the likeliest on, lies less than `limit` [B, 1, 1] or [B, K, 1] of weight."""
    coarse = place.clamp(max=BINS - 1).long()
    crossing, before = _crossing(coarse, weight, limit)
    fine = ((place - crossing) * BINS).clamp(min=0, max=BINS - 1).long()
    inside = coarse == crossing
    last, _ = _crossing(fine, weight * inside, limit - before)
    return (coarse < crossing) | (inside & (fine <= last))


def _crossing(
    bins: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last bin before which there is less weight than `limit`, and that weight; [B, K, 1] both."""
    empty = torch.zeros_like(weight[..., :1]).expand(*weight.shape[:-1], BINS)
    upto = empty.scatter_add(-1, bins, weight).cumsum(-1)
    over = (upto < limit).long().sum(-1, keepdim=True).clamp(max=BINS - 1)
    before = torch.where(over > 0, upto.gather(-1, (over - 1).clamp(min=0)), 0.0)
    return over, before


def _draw(weight: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token [B, K] at which the cumulative weight passes `uniforms` of the whole; never one without weight."""
    blocks = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1)  # [B, K, V / BLOCK]
    index, rest = _pick(sums, uniforms * sums.sum(-1))
    chosen = blocks.gather(2, index[..., None, None].expand(-1, -1, 1, BLOCK))[:, :, 0]
    token, _ = _pick(chosen, rest)
    return index * BLOCK + token


def _pick(weight: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the cumulative weight [B, K, N] first exceeds `target` [B, K], and what of the target is left there."""
    upto = weight.cumsum(-1)
    last = (upto < upto[..., -1:]).long().sum(-1)  # rounding may leave the target at or above the sum
    index = torch.minimum((upto <= target[..., None]).long().sum(-1), last)
    before = torch.where(index > 0, upto.gather(-1, (index - 1).clamp(min=0)[..., None])[..., 0], 0.0)
    return index, target - before
