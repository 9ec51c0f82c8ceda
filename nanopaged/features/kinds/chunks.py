"""A recurrence over a step's tokens, in plain torch: a sequence's only token by itself, several in chunks. Drafts are
computed one after the other, because the state after each is kept."""
from collections.abc import Callable

import torch
from torch import Tensor

from nanopaged.features.kinds.recurrent import NOBODYS, StateSlots

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def scan(one: Recurrence, chunk: Recurrence, inputs: tuple[Tensor, ...], gates: tuple[Tensor, ...], states: Tensor,
         s: StateSlots) -> Tensor:
    """The outputs of all tokens, [T, ..]; the states are written into s.targets.

    one      one(*inputs, *gates, state) -> (outputs, state): a token of each of N texts. Inputs are [N, ..]
    chunk    the same of n chunks of L tokens. Inputs are [n, L, ..]; where the gates are 0 is no token
    inputs   [T, ..]; gates [T, heads]; states [slots, ..]
    """
    state, count, out = states.index_select(0, s.sources), len(gates[0]), inputs[0]
    kept, alone = s.targets.view(len(state), -1), (s.lens if s.query_lens is None else s.query_lens) == 1
    # First the tokens that a place computes one after the other: its only one, or with drafts up to s.most.
    for t in range(s.most):
        at, exists = (s.first + t).clamp(max=count - 1), alone & (s.lens > t)
        outs, new = one(*(part.index_select(0, at) for part in (*inputs, *gates)), state)
        if s.most == 1 and not s.rounds:  # decode: a sequence for each token
            states[kept[:, 0]] = new
            return outs
        out = out if t else outs.new_zeros(count + 1, *outs.shape[1:])  # the last row takes what is no token
        out[torch.where(exists, at, count)] = outs
        state = torch.where(exists.view(-1, *[1] * (state.dim() - 1)), new, state)
        for column in range(kept.shape[1] if s.most > 1 else 1):
            states[torch.where(exists & (s.counts[:, column] == t + 1), kept[:, column], NOBODYS)] = state
    for places, tokens, done in s.rounds:
        is_token, at = tokens >= 0, tokens.clamp(min=0)
        parts = *(part[at] for part in inputs), *(gate[at] * is_token[..., None] for gate in gates)
        of_chunk, state[places] = chunk(*parts, state[places])
        out[tokens[is_token]] = of_chunk[is_token]
        for column in range(kept.shape[1]):  # the live slot, and marks
            states[torch.where(s.counts[places, column] == done, kept[places, column], NOBODYS)] = state[places]
    return out[:count]
