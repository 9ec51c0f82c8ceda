"""The masks of grammars on the device. nanopaged/features/grammar.py says which tokens a text allows.

A step with grammars is sampled late. Its mask depends on the token before, which the host knows once it has read the
step before; with a lookahead that is after this launch. So the step is sampled when the next one is launched
(`Runner.unsampled`), or at the latest when it is read:

    launch 1 | sample 1, launch 2 | read 1 | sample 2, launch 3 | read 2 | ...
"""
import ctypes
from collections import Counter

import torch
from torch import Tensor

from nanopaged import engine


class Masker:
    """Sends masks to the device as bits: 19 KB a row for 152,000 tokens.

    vocab_size: of the model, which may have more tokens than the grammars' tokenizer
    max_rows: of logits in a step
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device):
        self.num_bytes = 4 * engine.cdiv(vocab_size, 32)
        # Written again only after a step that read it was read itself: sampling waits for the tokens before.
        self.host = torch.empty(max_rows, self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.masks = torch.empty_like(self.host, device=device)

    def apply(self, logits: Tensor, grammars: list[tuple[int, engine.Sequence, int]]) -> Tensor:
        """Set the logits of tokens that may not come next to -inf. grammars: (row of logits, sequence, position) of
        those that have one. A token that the grammar has forced by now is not sampled."""
        seqs = {row: seq for row, seq, position in grammars if seq.is_pending(position)}
        return mask_logits(logits, self.send([seqs.get(row) for row in range(len(logits))]))

    def send(self, seqs: list[engine.Sequence | None]) -> Tensor:
        """The masks [R, num_bytes] on the device, one for each sequence; None: of a row that allows all tokens. A
        sequence with drafts has several: that of its next token, then those after one draft, two .."""
        start, num_rows = self.host.data_ptr(), Counter[engine.Sequence | None]()
        for row, seq in enumerate(seqs):
            address = start + self.num_bytes * row
            if seq is None:
                ctypes.memset(address, 0xFF, self.num_bytes)
            else:
                try:
                    size = seq.sampling.grammar.fill_mask(address, seq.drafts[:num_rows[seq]])
                except BaseException as error:  # a panic of Rust: nothing is allowed, which ends this sequence
                    size, seq.stop_reason = 0, f"the grammar failed: {error!r}"
                ctypes.memset(address + size, 0, self.num_bytes - size)  # ids that the tokenizer lacks
            num_rows[seq] += 1
        return self.masks[:len(seqs)].copy_(self.host[:len(seqs)], non_blocking=True)


def mask_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Set the logits of tokens that may not come next to -inf: logits [R, vocab_size]; masks [R, num_bytes] uint8, a
    bit for each token, and unused bits at the end."""
    bits = masks[:, :, None] & (1 << torch.arange(8, dtype=torch.uint8, device=masks.device))
    return logits.masked_fill(bits.flatten(1)[:, :logits.shape[1]] == 0, -torch.inf)
