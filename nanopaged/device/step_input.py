"""A step as the runner reads it: flat lists of integers."""
from collections.abc import Callable
from dataclasses import dataclass, field

from nanopaged import engine

Part = tuple[engine.Sequence, int, int]  # (sequence, number of new tokens, tokens in the cache after this step)


@dataclass(slots=True)
class StepInput:
    """A step as lists of integers: the new tokens of all sequences in one flat batch. T tokens, N **places**: a place
    is an index into the lists [N], of a sequence's new tokens. A sequence has one; with drafts it has one for each of
    its tokens.

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
        sampling_places   0     1     2                     [R]      places that sample, here all three
        sampled_rows      0     2     1                     [R]      the scheduler has them in the order A B C
    """
    seqs: list[engine.Sequence]
    num_tokens: list[int]  # [N] new tokens of each place
    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)  # -1: K and V are in the cache already
    query_start_loc: list[int] = field(default_factory=[0].copy)
    seq_lens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sampling_places: list[int] = field(default_factory=list)  # a logit row for each
    sampled_rows: list[int] = field(default_factory=list)  # the logit row of each of SchedulerOutput.sampled
    more: list[list[int]] = field(default_factory=list)  # lists that a feature sends to the device, too

    @property
    def lists(self) -> list[list[int]]:
        return [self.input_ids, self.positions, self.slot_mapping, self.query_start_loc, self.seq_lens, self.rows,
                *self.more]

    @classmethod
    def of(cls, step: engine.SchedulerOutput, block_size: int,
           arrange: Callable[[list[Part]], list[Part]] = list) -> "StepInput":
        """arrange: puts the parts with one new token into another order"""
        parts, batch = cls.parts_of(step), cls([], [])
        ones = [part for part in parts if part[1] == 1]
        ones.sort(key=lambda part: part[0].num_computed_tokens, reverse=True)
        for part in arrange(ones):
            batch._add(*part, block_size)
        for seq, num_tokens, end in parts:
            if num_tokens > 1:
                batch._add(seq, num_tokens, end, block_size)
        batch._find_sampling_places(step)
        return batch

    @staticmethod
    def parts_of(step: engine.SchedulerOutput) -> list[Part]:
        """What becomes a place, in any order. The scheduler has counted this step's tokens as computed, so
        num_computed_tokens is the context's length after this step."""
        return [(seq, num_tokens, seq.num_computed_tokens) for seq, num_tokens in zip(step.seqs, step.num_tokens)]

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

    def _find_sampling_places(self, step: engine.SchedulerOutput) -> None:
        """A place samples the token at position p of its sequence if the cache has p tokens of it after this step."""
        place_of = {(seq, length): place for place, (seq, length) in enumerate(zip(self.seqs, self.seq_lens))}
        sampled = [place_of[key] for key in zip(step.sampled, step.positions)]
        self.sampling_places = sorted(sampled)
        row_of = {place: row for row, place in enumerate(self.sampling_places)}
        self.sampled_rows = [row_of[place] for place in sampled]
