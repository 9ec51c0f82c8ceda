"""Cascade attention: several sequences read what they have in common together. An addition to the decode of chapter 1.

Samples of one prompt, chats with one system prompt and the rows of a sequence with drafts have tables that begin with
the same blocks. Attention would read the K and V of these blocks once for each of them. But a program can compute a
tile of keys with the queries of several sequences (Juravsky et al. 2024, Hydragen; Ye et al. 2024, cascade attention in
FlashInfer). The splits of a context, which decode has anyway, join both parts:

    sequence   splits of 128 tokens, in tiles of 64
    A          | 0  0  1  1  2 | 2  3  3            prefix launch: 5 tiles with the queries of A and B; 4 tiles with
    B          | 0  0  1  1  2 | 2  3  3                           those of C, D and E, 4 more with those of D and E
    C          | 0  0  1  1 | 2  2  3  3            suffix launch: the other tiles, for each sequence by itself
    D          | 0  0  1  1 | 2  2  3  3 | 4        merge:         as for any context in splits
    E          | 0  0  1  1 | 2  2  3  3 | 4

                                        first sequence   how many   first token   end
    the entries of the prefix launch    0 (A)            2          0             320
                                        2 (C)            3          0             256
                                        3 (D)            2          256           512
    num_common_tokens                   320  320  256  512  512

In a batch these sequences stand side by side. The suffix launch resumes each sum where the prefix launch stopped, also
within a split. Sequences share only while their splits have the same length, so each sum adds the same numbers in the
same order as for its sequence alone. Two entries of one sequence run at the same time and cannot continue one sum, so
they meet at the end of a split.

Sequences that have blocks in common are looked for when one joins or leaves the decoding batch, starts over or reaches
another split length, and at the latest after as many steps as a tile has tokens. Other steps only compare two lists.
"""
import operator
import os
from typing import Any

from nanopaged import engine, kernel, tiles
from nanopaged.tiles import widest_window

# An entry must spare attention so many tokens (more, if a step would have too many entries). Another launch and the
# merge take a few microseconds, in which an H200 reads K and V of some 4,000 tokens of a layer (with 8 kv heads of
# 128).
LEAST_TOKENS = 4096

Batch = list[tuple[engine.Sequence, int]]  # (sequence, number of its new tokens: in decode 1 plus its drafts)


class Cascade:
    """Finds the sequences of decode steps that have blocks in common.

    tile_n: tokens of a tile of keys, which split lengths depend on
    group: query heads that share a kv head
    most_columns: queries that one program can serve
    least_tokens: tokens that an entry must spare attention
    """

    def __init__(self, block_size: int, tile_n: int, group: int, most_columns: int = tiles.MAX_PREFIX_COLUMNS,
                 least_tokens: int = LEAST_TOKENS):
        self.block_size, self.tile_n, self.group, self.least_tokens = block_size, tile_n, group, least_tokens
        self.most_rows = most_columns // group
        self.batch: Batch = []  # the last one
        self.tables: list[list[int]] = []  # its block tables
        self.num_steps = 0  # until the next search, if the batch stays the same
        self.found: tuple[Batch, list[int], list[int], int] = [], [], [], 0
        self.splits: dict[engine.Sequence, tuple[int, int]] = {}  # see `_splits`

    def find(self, decoding: Batch) -> tuple[Batch, list[int], list[int], int]:
        """The decoding sequences in the order of a step, the entries one after another, the number of common tokens of
        each row, and the columns of a tile of queries; nothing of these if nothing is worth an entry."""
        tables = [seq.block_table for seq, _ in decoding]
        self.num_steps -= 1
        # A sequence that starts over, after a step that failed, has another list, even with the same blocks in it.
        if decoding != self.batch or any(map(operator.is_not, tables, self.tables)) or self.num_steps <= 0:
            self.batch, self.tables, self.num_steps = decoding, tables, self.tile_n
            self.found = decoding, [], [], 0
            if len({seq.block_table[0] for seq, _ in decoding}) < sum(num_rows for _, num_rows in decoding):
                self._search(decoding)
        return self.found

    def _search(self, decoding: Batch) -> None:
        self.splits = {seq: self._splits(seq, num_rows) for seq, num_rows in decoding}
        # Search again when a split length may change: a sequence of n rows grows by up to n tokens in a step.
        self.num_steps = min(self.tile_n, *(1 + (tiles.longest_with(self.splits[seq][0]) - seq.num_computed_tokens)
                                            // num_rows for seq, num_rows in decoding))
        least, entries = self.least_tokens, [0] * (4 * tiles.MOST_ENTRIES + 1)
        while len(entries) > 4 * tiles.MOST_ENTRIES:
            order: Batch = []
            entries, num_common = [], list[int]()
            self._share(decoding, 0, 0, least, order, entries, num_common)
            least *= 2
        if entries:
            self.found = order, entries, num_common, tiles.prefix_columns(max(entries[1::4]), self.group)

    def _splits(self, seq: engine.Sequence, num_rows: int) -> tuple[int, int]:
        """(tokens per split, tokens that all rows of a sequence see); 0 tokens if the rows' splits differ in length."""
        lens = seq.num_computed_tokens - num_rows + 1, seq.num_computed_tokens
        first, last = (tiles.split_length(length, self.tile_n) for length in lens)
        return last, lens[0] if first == last else 0

    def _share(self, batch: Batch, depth: int, covered: int, least: int, order: Batch, entries: list[int],
               num_common: list[int]) -> None:
        """Append the batch's rows to `order` and `num_common`, and their entries, outer ones before inner ones. The
        rows have `depth` blocks in common, and outer entries cover `covered` tokens. An entry with inner ones ends with
        a whole split, others with a whole tile."""
        parts: dict[tuple[int, ...], Batch] = {}
        for seq, num_rows in batch:
            split_len, num_tokens = self.splits[seq]
            key: tuple[int, ...] = (split_len, seq.block_table[depth]) if depth * self.block_size < num_tokens else ()
            parts.setdefault(key, []).append((seq, num_rows))
        for key, part in parts.items():
            num_rows = sum(rows for _, rows in part)
            if not key or num_rows == 1:
                order += part
                num_common += [covered] * num_rows
                continue
            tables = [seq.block_table for seq, _ in part]
            same = len(os.path.commonprefix(tables))  # any lists: it compares the least and the largest
            end = min(same * self.block_size, *(self.splits[seq][1] for seq, _ in part)) // self.tile_n * self.tile_n
            whole, is_worth = end // key[0] * key[0], (num_rows - 1) * (end - covered) >= least
            row, at = len(num_common), len(entries)
            self._share(part, same, whole if is_worth else covered, least, order, entries, num_common)
            if len(entries) > at:
                end = whole
            elif is_worth:
                num_common[row:] = [end] * num_rows
            if is_worth and end > covered:
                own = [(row + i, min(self.most_rows, num_rows - i), covered, end)
                       for i in range(0, num_rows, self.most_rows)]
                entries[at:at] = [number for entry in own for number in entry]


def pick(runner: Any, disable: bool | None) -> Cascade | None:
    """Finds the blocks that decode reads once for several sequences. disable: None: where a text would get other bits;
    False: also there, if its tiles fit. None is returned, too, if attention is torch's or all layers have a window."""
    config, dtype, kv_dtype, device = runner.config, runner.dtype, runner.kv_dtype, runner.device
    group = config.num_heads // config.num_kv_heads
    tile_n = tiles.decode_config(1, 2, group, config.head_dim, dtype, kv_dtype, device)["TILE_N"]
    fits = config.head_dim <= 128 and tiles.shared_memory(device) > tiles.LARGE_SHARED_MEMORY
    is_wanted = not disable and (disable is False and fits or tiles.has_same_bits(tile_n, dtype, kv_dtype, device))
    is_able = (runner.kernels is kernel.TRITON and 2 * group <= tiles.MAX_PREFIX_COLUMNS
               and not widest_window(config))
    return Cascade(runner.block_size, tile_n, group) if is_able and is_wanted else None
