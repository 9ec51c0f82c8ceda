"""Cascade attention: what several sequences have in common is read once. An addition to the decode of chapter 1.

Samples of one prompt, chats with one system prompt and the rows of a sequence with drafts have tables that begin with
the same blocks. Attention would read the K and V of these blocks once for each of them. A context is cut into splits
anyway, and the sums of its splits are merged. So a program can compute a split that several sequences have in common
with the queries of all of them (Juravsky et al. 2024, Hydragen; Ye et al. 2024, cascade attention in FlashInfer):

    sequence   splits of its context
    A          | 0  1  2  3 | 4  5           prefix launch: splits 0 to 3 with the queries of A, B, C and D, and
    B          | 0  1  2  3 | 4  5                          splits 4 to 5 with those of C and D
    C          | 0  1  2  3 | 4  5 | 6       suffix launch: the rest, for each sequence by itself
    D          | 0  1  2  3 | 4  5 | 6       merge:         as for any context in splits

                                        first sequence   how many   first split   end
    the entries of the prefix launch    0 (A)            4          0             4
                                        2 (C)            2          4             6
    num_common_splits                   4  4  6  6

In a batch these sequences stand side by side. Whole splits alone are shared, and between sequences whose splits have
the same length. Each sum therefore has the bits that it has for a sequence by itself.

Sequences that have blocks in common are found when one of them joins or leaves the decoding batch, or reaches another
split length. Other steps only compare two lists.
"""
import math
from typing import NamedTuple

from nanopaged import tiles
from nanopaged.scheduling.additions import Sequence

# An entry must spare attention so many tokens. The two launches and the merge take a few microseconds more, in which an
# H200 reads K and V of some 4,000 tokens of a layer (with 8 kv heads of 128).
LEAST_TOKENS = 4096
MOST_ENTRIES = 64  # of a step: what a recorded step has room for (graphs.py)
MOST_NUMBERS = 100_000  # after that many they are given out anew

Decoding = list[tuple[Sequence, int]]  # decoding sequences, each with its rows: the new token, and its drafts


class Member(NamedTuple):
    """What is known of a decoding sequence."""
    table: list[int]  # its block table, another object when it comes back after a preemption
    split_len: int
    unit: int  # tokens: whole splits that are whole blocks
    chain: list[int]  # for each unit a number, which stands for all blocks up to its end


class Cascade:
    """Finds the sequences of decode steps that have blocks in common.

    tile_n: tokens of a tile of keys, which split lengths depend on
    most_rows: rows that one program can serve
    least_tokens: an entry must spare attention so many
    """

    def __init__(self, block_size: int, tile_n: int, most_rows: int, least_tokens: int = LEAST_TOKENS):
        self.block_size, self.tile_n, self.most_rows, self.least_tokens = block_size, tile_n, most_rows, least_tokens
        self.numbers: dict[tuple[int, ...], int] = {}  # (number of the unit before, the unit's blocks) -> number
        self.members: dict[Sequence, Member] = {}
        self.batch: Decoding = []  # the last one
        self.num_steps = 0.0  # for which `found` holds, if the batch stays the same
        self.found: tuple[Decoding, list[int], list[int]] = [], [], []

    def find(self, batch: Decoding) -> tuple[Decoding, list[int], list[int]]:
        """The batch in the order of a step, the entries one after another, and the number of common splits of each row;
        both empty if nothing is worth an entry."""
        self.num_steps -= 1
        if batch == self.batch and self.num_steps > 0:
            return self.found
        self.batch, self.found, self.num_steps = batch, (batch, [], []), math.inf
        has_none = len({seq.block_table[0] for seq, _ in batch}) == sum(num_rows for _, num_rows in batch)
        if has_none or len(self.numbers) > MOST_NUMBERS:
            self.numbers, self.members = {}, {}
        if has_none:
            return self.found
        self.members = {seq: self._member(seq, num_rows) for seq, num_rows in batch}
        # A sequence with several rows may grow by as many tokens in a step.
        self.num_steps = 1 + min((tiles.longest_with(self.members[seq].split_len) - seq.num_computed_tokens) // num_rows
                                 for seq, num_rows in batch)
        least, entries = self.least_tokens, [0] * (4 * MOST_ENTRIES + 1)
        while len(entries) > 4 * MOST_ENTRIES:
            order: Decoding = []
            entries, num_common = [], list[int]()
            self._share(batch, 0, 0, least, order, entries, num_common)
            least *= 2
        if entries:
            self.found = order, entries, num_common
        return self.found

    def _member(self, seq: Sequence, num_rows: int) -> Member:
        split_len = tiles.split_length(seq.num_computed_tokens, self.tile_n)
        first_len = seq.num_computed_tokens - num_rows + 1  # of its first row
        known = self.members.get(seq)
        if not known or known.table is not seq.block_table or known.split_len != split_len:
            known = Member(seq.block_table, split_len, math.lcm(split_len, self.block_size), [])
        if tiles.split_length(first_len, self.tile_n) != split_len:
            return known._replace(chain=[])
        for i in range(len(known.chain), first_len // known.unit):
            length = known.unit // self.block_size
            before = known.chain[-1] if known.chain else -split_len
            key = before, *seq.block_table[i * length:(i + 1) * length]
            known.chain.append(self.numbers.setdefault(key, len(self.numbers)))
        return known

    def _share(self, batch: Decoding, depth: int, covered: int, least: int, order: Decoding, entries: list[int],
               num_common: list[int]) -> None:
        """Append these sequences to the lists. They have `depth` units in common, and entries cover `covered` of
        them."""
        parts: dict[int, Decoding] = {}
        for seq, num_rows in batch:
            parts.setdefault(next(iter(self.members[seq].chain[depth:]), -1), []).append((seq, num_rows))
        for number, part in parts.items():
            num_rows = sum(rows for _, rows in part)
            member, chains = self.members[part[0][0]], [self.members[seq].chain for seq, _ in part]
            per_unit = member.unit // member.split_len
            if number < 0 or num_rows == 1:
                order += part
                num_common += [covered * per_unit] * num_rows
                continue
            common = next((i for i, numbers in enumerate(zip(*chains)) if len(set(numbers)) > 1), min(map(len, chains)))
            is_worth = (num_rows - 1) * (common - covered) * member.unit >= least
            for row in range(0, num_rows if is_worth else 0, self.most_rows):
                entries += [len(num_common) + row, min(self.most_rows, num_rows - row), covered * per_unit,
                            common * per_unit]
            self._share(part, common, common if is_worth else covered, least, order, entries, num_common)
