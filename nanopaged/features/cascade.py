"""Cascade attention: several sequences read what they have in common together. An addition to the decode of chapter 1.

Samples of one prompt, chats with one system prompt and the places of a sequence with drafts have tables that begin with
the same blocks. Attention would read the K and V of these blocks once for each of them. But a program can compute a
tile of keys with the queries of several sequences (Juravsky et al. 2024, Hydragen; Ye et al. 2024, cascade attention in
FlashInfer). The splits of a context, which decode has anyway, join both parts:

    sequence   splits of 128 tokens, in tiles of 64
    A          | 0  0  1  1  2 | 2  3  3            prefix launch: 5 tiles with the queries of A and B; 4 tiles with
    B          | 0  0  1  1  2 | 2  3  3                           those of C, D and E, 4 more with those of D and E
    C          | 0  0  1  1 | 2  2  3  3            suffix launch: the other tiles, for each sequence by itself
    D          | 0  0  1  1 | 2  2  3  3 | 4        merge:         as for any context in splits
    E          | 0  0  1  1 | 2  2  3  3 | 4

                                        first place      how many   first token   end
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

# An entry must spare attention so many tokens (more, if a step had too many entries). Another launch and the merge take
# a few microseconds, in which an H200 reads K and V of some 4,000 tokens of a layer (with 8 kv heads of 128).
LEAST_TOKENS = 4096

Batch = list[tuple[engine.Sequence, int]]  # (sequence, number of its places in the step: 1 plus its drafts)
Entry = tuple[int, int, int, int]  # first place, number of places, first token, end


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
        self.most_places = most_columns // group
        self.batch: Batch = []  # the last one
        self.tables: list[list[int]] = []  # its block tables
        self.num_steps = 0  # until the next search, if the batch stays the same
        self.found: tuple[Batch, list[int], list[int], int] = [], [], [], 0
        self.splits: dict[engine.Sequence, tuple[int, int]] = {}  # see `_splits`

    def find(self, decoding: Batch) -> tuple[Batch, list[int], list[int], int]:
        """The decoding sequences in the order of a step, the entries one after another, the number of common tokens of
        each place, and the columns of a tile of queries; nothing of these if nothing is worth an entry."""
        tables = [seq.block_table for seq, _ in decoding]
        self.num_steps -= 1
        # A sequence that starts over, after a step that failed, has another list, even with the same blocks in it.
        if decoding != self.batch or any(map(operator.is_not, tables, self.tables)) or self.num_steps <= 0:
            self.batch, self.tables, self.num_steps = decoding, tables, self.tile_n
            self.found = decoding, [], [], 0
            if len({seq.block_table[0] for seq, _ in decoding}) < sum(num_places for _, num_places in decoding):
                self._search(decoding)
        return self.found

    def _search(self, decoding: Batch) -> None:
        self.splits = {seq: self._splits(seq, num_places) for seq, num_places in decoding}
        # Search again when a split length may change: a sequence with n places grows by up to n tokens in a step.
        self.num_steps = min(self.tile_n, *(1 + (tiles.longest_with(self.splits[seq][0]) - seq.num_computed_tokens)
                                            // num_places for seq, num_places in decoding))
        least = self.least_tokens
        order, entries, num_common = self._share(decoding, 0, 0, least)
        while len(entries) > tiles.MOST_ENTRIES:
            least *= 2
            order, entries, num_common = self._share(decoding, 0, 0, least)
        if entries:
            columns = tiles.prefix_columns(max(num_places for _, num_places, _, _ in entries), self.group)
            self.found = order, [number for entry in entries for number in entry], num_common, columns

    def _splits(self, seq: engine.Sequence, num_places: int) -> tuple[int, int]:
        """(tokens per split, tokens that all places of a sequence see); 0 tokens if their splits differ in length."""
        lens = seq.num_computed_tokens - num_places + 1, seq.num_computed_tokens
        first, last = (tiles.split_length(length, self.tile_n) for length in lens)
        return last, lens[0] if first == last else 0

    def _share(self, batch: Batch, depth: int, covered: int, least: int) -> tuple[Batch, list[Entry], list[int]]:
        """(the batch in a new order, its entries, each place's common tokens); entries count places from its first. The
        sequences have `depth` blocks in common, and outer entries cover `covered` tokens. In the drawing, blocks of 64:

            batch        depth  covered    parts         entries                               common tokens
            A B C D E    0      0          A B, C D E    0 2 0 320, 2 3 0 256, 3 2 256 512     320 320 256 512 512
            A B          5      256        A, B          none: that of A B ends with a tile    256 256
            C D E        4      256        C, D E        1 2 256 512: outer ends with a split  256 512 512
        """
        parts: dict[tuple[int, ...], Batch] = {}  # by split length and next block; (): not all their places see it
        for seq, num_places in batch:
            split_len, num_tokens = self.splits[seq]
            key: tuple[int, ...] = (split_len, seq.block_table[depth]) if depth * self.block_size < num_tokens else ()
            parts.setdefault(key, []).append((seq, num_places))
        order, entries = [], []
        num_common: list[int] = []
        for key, part in parts.items():
            place, num_places = len(num_common), sum(num for _, num in part)
            if not key or num_places == 1:
                order += part
                num_common += [covered] * num_places
                continue
            same = len(os.path.commonprefix([seq.block_table for seq, _ in part]))  # of any lists
            num_tokens = min(same * self.block_size, *(self.splits[seq][1] for seq, _ in part))
            end_of_tile, end_of_split = num_tokens - num_tokens % self.tile_n, num_tokens - num_tokens % key[0]
            pays = (num_places - 1) * (end_of_tile - covered) >= least
            part, inner, common = self._share(part, same, end_of_split if pays else covered, least)
            end = end_of_split if inner else end_of_tile  # an inner entry begins with a split
            if pays and end > covered:
                entries += [(place + first, min(self.most_places, num_places - first), covered, end)
                            for first in range(0, num_places, self.most_places)]
            entries += [(place + first, num, start, end) for first, num, start, end in inner]
            order += part
            num_common += [end] * num_places if pays and not inner else common
        return order, entries, num_common


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
