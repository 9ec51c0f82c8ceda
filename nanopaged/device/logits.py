"""What changes logits before tokens are drawn from them: filters, and the steps of features (edits.py, grammar.py)."""
import math
from typing import Any

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.sampling_params import SMALLEST_TEMPERATURE

UNIT = 2.0**38  # the integer that stands for probability 1, see `kept_tokens`


class LogitsStep:
    """Changes logits before tokens are drawn from them: features/edits.py and features/grammar.py have one each. A
    runner has none until the first request asks."""
    is_late = False  # True: its plan needs the tokens of the step before on the host

    def plan(self, seqs: list[engine.Sequence], positions: list[int]) -> Any | None:
        """What to change in a step, when it is launched; None: nothing. positions: of the tokens that seqs sample"""
        raise NotImplementedError

    def __call__(self, logits: Tensor, plan: Any, rows: Tensor, positions: Tensor) -> Tensor:
        """The changed logits, of any float type: R logit rows [R, vocab_size], which stay as they are. rows
        [R]: the batch rows of the sequences"""
        raise NotImplementedError

    def drew(self, tokens: Tensor, plan: Any, rows: Tensor) -> None:
        """These tokens [R] have been drawn."""


def filtered(logits: Tensor, temperature: Tensor, settings: Tensor) -> Tensor:
    """The logits [R, vocab_size], with -inf for the tokens that filters drop. The noise of the others stays as it is,
    and a sequence without a filter keeps all tokens: it draws the same token as in a batch without filters."""
    is_greedy = temperature < SMALLEST_TEMPERATURE
    scaled = logits.float() / temperature.masked_fill(is_greedy, 1.0)[:, None]
    return logits.masked_fill(~kept_tokens(scaled, settings), -math.inf)


def kept_tokens(logits: Tensor, settings: Tensor) -> Tensor:
    """A mask of the tokens that min_p, top_k and top_p keep: logits [R, vocab_size], divided by the temperature.

    The order is vLLM's. top_k also keeps tokens as likely as the k-th. top_p adds up the probabilities of the tokens
    that min_p and top_k keep; among equal tokens it keeps the lower ids. The best token is always kept.
    """
    _, top_p, min_p = settings.view(torch.float32)[:, :3, None].unbind(1)
    top_k = settings.view(torch.int64)[:, 3]  # 0: all tokens
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = top_k.masked_fill(top_k <= 0, logits.shape[-1]).clamp(max=logits.shape[-1])
    keep = ordered >= ordered.gather(-1, top_k[:, None] - 1)
    ordered = torch.softmax(ordered, dim=-1)
    keep &= ordered >= min_p * ordered[:, :1]
    # A token is kept if the tokens before it sum to less than top_p of the kept probability. The sums are of integers,
    # hence exact: the order in which a GPU adds changes with the number of logit rows, and for a single one from one
    # run to the next. top_p = 1 also keeps the tail, whose probabilities round to 0 units.
    weights = (ordered * UNIT).long() * keep
    cumulative = weights.cumsum(-1)
    keep &= (cumulative - weights < top_p.double() * cumulative[:, -1:]) | (top_p >= 1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)
