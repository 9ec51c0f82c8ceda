"""A recurrence over a step's tokens, in plain torch: a sequence's only token by itself, several in chunks."""
from collections.abc import Callable

import torch
from torch import Tensor

from nanopaged.features.kinds.recurrent import StateSlots

Recurrence = Callable[..., tuple[Tensor, Tensor]]


def scan(one: Recurrence, chunk: Recurrence, inputs: tuple[Tensor, ...], gates: tuple[Tensor, ...], states: Tensor,
         s: StateSlots) -> Tensor:
    """The outputs of all tokens, [T, ..]; the states are written into s.targets.

    one      one(*inputs, *gates, state) -> (outputs, state): a token of each of N texts. Inputs are [N, ..]
    chunk    the same of n chunks of L tokens. Inputs are [n, L, ..]; where the gates are 0 is no token
    inputs   [T, ..]; gates [T, heads]; states [slots, ..]
    """
    state, count = states.index_select(0, s.sources), len(gates[0])
    kept = s.targets.view(len(state), -1)
    # First every sequence's first token by itself; those of longer ones are computed again, in chunks.
    first = s.first.clamp(max=count - 1)
    out1, state1 = one(*(part.index_select(0, first) for part in (*inputs, *gates)), state)
    if not s.rounds:  # decode: a sequence for each token
        states[kept[:, 0]] = state1
        return out1
    out, alone = out1.new_zeros(count, *out1.shape[1:]), s.lens == 1
    out[first] = torch.where(alone.view(-1, *[1] * (out1.dim() - 1)), out1, 0)
    states[torch.where(alone, kept[:, 0], 0)] = state1
    for places, tokens, done in s.rounds:
        is_token, at = tokens >= 0, tokens.clamp(min=0)
        parts = *(part[at] for part in inputs), *(gate[at] * is_token[..., None] for gate in gates)
        of_chunk, state[places] = chunk(*parts, state[places])
        out[tokens[is_token]] = of_chunk[is_token]
        for column in range(kept.shape[1]):  # the live slot, and marks
            states[torch.where(s.counts[places, column] == done, kept[places, column], 0)] = state[places]
    return out
