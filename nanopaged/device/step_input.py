"""A step as the runner reads it: flat lists of integers."""
from dataclasses import dataclass, field
from typing import Any

from nanopaged import engine


@dataclass(slots=True)
class StepInput:
    """A step as lists of integers: the new tokens of all sequences in one flat batch. T tokens, N places: the **place**
    of a sequence is its index in the batch. (With drafts it has a place for its last token and one for each draft.)

    Sequences with one new token come first, the longest context at the front: Triton's attention has one launch for
    these and one for the others, and the longest context should not run alone at the end. With block_size 4, A (table
    [0, 1]) and C (table [2, 6]) decode and the prompt of B (table [5]) comes in:

        seqs              A     C     B
        input_ids         a6    c4    b0  b1  b2  b3        [T]      -1: pending, known only on the device
        positions         6     4     0   1   2   3         [T]
        slot_mapping      6     24    20  21  22  23        [T]      block_table[position // 4] * 4 + position % 4
        query_start_loc   0     1     2              6      [N + 1]
        seq_lens          7     5     4                     [N]      tokens in the cache after this step
        rows              4     0     7                     [N]      batch rows: where the device has their tables
    """
    seqs: list[engine.Sequence]
    num_tokens: list[int]  # [N] new ones
    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)  # -1: K and V are in the cache already
    query_start_loc: list[int] = field(default_factory=[0].copy)
    seq_lens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    num_common_tokens: list[int] = field(default_factory=list)  # of decodes, or empty: see features/cascade.py
    cascade: list[int] = field(default_factory=list)  # entries of the cascade
    cascade_columns: int = 0

    @property
    def lists(self) -> list[list[int]]:
        return [self.input_ids, self.positions, self.slot_mapping, self.query_start_loc, self.seq_lens, self.rows,
                self.num_common_tokens, self.cascade]

    @classmethod
    def of(cls, step: engine.SchedulerOutput, block_size: int, cascade: Any = None) -> "StepInput":
        decodes, prompts = list[tuple[engine.Sequence, int]](), list[tuple[engine.Sequence, int]]()
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            (decodes if cls.is_decode(seq, num_tokens) else prompts).append((seq, num_tokens))
        # The scheduler has counted this step's tokens as computed: that is the context's length after this step.
        decodes.sort(key=lambda decode: decode[0].num_computed_tokens, reverse=True)
        batch = cls([], [])
        if cascade:
            decodes, batch.cascade, batch.num_common_tokens, batch.cascade_columns = cascade.find(decodes)
        for seq, num_tokens in decodes:  # one token; with drafts several, each in a place of its own
            for seq_len in range(seq.num_computed_tokens - num_tokens + 1, seq.num_computed_tokens + 1):
                batch._add(seq, 1, seq_len, block_size)
        for seq, num_tokens in prompts:
            batch._add(seq, num_tokens, seq.num_computed_tokens, block_size)
        return batch

    @staticmethod
    def is_decode(seq: engine.Sequence, num_tokens: int) -> bool:
        """Whether each of the new tokens has a place of its own, and none is part of a chunk."""
        return num_tokens == 1

    @staticmethod
    def input_id(seq: engine.Sequence, position: int) -> int:
        """The token at this position, -1 if it is known only on the device."""
        return seq.token_ids[position] if position < len(seq.token_ids) else -1

    def _add(self, seq: engine.Sequence, num_tokens: int, end: int, size: int) -> None:
        self.seqs.append(seq)
        self.num_tokens.append(num_tokens)
        token_ids, table, start = seq.token_ids, seq.block_table, end - num_tokens
        if num_tokens == 1:
            self.input_ids.append(self.input_id(seq, start))
            self.positions.append(start)
            self.slot_mapping.append(-1 if start < seq.num_found_tokens else table[start // size] * size + start % size)
        else:  # a chunk: the host knows the ids, and none of its K and V is in the cache, so no slot is -1
            self.input_ids += token_ids[start:end]
            self.positions += range(start, end)
            for index in range(start // size, engine.cdiv(end, size)):
                offset = (table[index] - index) * size  # slot - position, which is the same in a whole block
                self.slot_mapping += range(max(start, index * size) + offset, min(end, (index + 1) * size) + offset)
        self.query_start_loc.append(len(self.input_ids))
        self.seq_lens.append(end)
        self.rows.append(seq.row)
