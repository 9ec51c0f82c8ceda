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
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine, kernel, model, tiles
from nanopaged.device.runner import Runner, StepTensors
from nanopaged.device.step_input import Part, StepInput
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.tiles import programs_per_context, widest_window

# An entry must spare attention so many tokens (more, if a step had too many entries). Another launch and the merge take
# a few microseconds, in which an H200 reads K and V of some 4,000 tokens of a layer (with 8 kv heads of 128).
LEAST_TOKENS = 4096
# Columns of a tile of queries that attend to common blocks: (sequence, query head) pairs.
MIN_PREFIX_COLUMNS, MAX_PREFIX_COLUMNS = 16, 64
PREFIX_STAGES = {16: 3, 32: 2, 64: 2}  # by columns (H200); with more, 64 columns leave room for one program

Batch = list[tuple[engine.Sequence, int]]  # (sequence, number of its places in the step: 1 plus its drafts)
Entry = tuple[int, int, int, int]  # first place, number of places, first token, end


class Cascade:
    """Finds the sequences of decode steps that have blocks in common.

    tile_n: tokens of a tile of keys, which split lengths depend on
    group: query heads that share a kv head
    most_columns: queries that one program can serve
    least_tokens: tokens that an entry must spare attention
    """
    rooms = 8, 64  # numbers of entries in recorded steps (graphs.py); a step has no more than the largest
    widest = MAX_PREFIX_COLUMNS

    def __init__(self, block_size: int, tile_n: int, group: int, most_columns: int = MAX_PREFIX_COLUMNS,
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
        self.num_steps = min(self.tile_n, *(1 + (longest_with(self.splits[seq][0]) - seq.num_computed_tokens)
                                            // num_places for seq, num_places in decoding))
        least = self.least_tokens
        order, entries, num_common = self._share(decoding, 0, 0, least)
        while len(entries) > self.rooms[-1]:
            least *= 2
            order, entries, num_common = self._share(decoding, 0, 0, least)
        if entries:
            columns = prefix_columns(max(num_places for _, num_places, _, _ in entries), self.group)
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


def longest_with(split_len: int) -> int:
    """The longest context whose splits have this length."""
    return split_len * (16 if split_len < tiles.MID_SPLIT else tiles.MAX_SPLITS)


def prefix_columns(most_sharers: int, group: int) -> int:
    """The columns of a tile for the queries of so many sequences."""
    return max(MIN_PREFIX_COLUMNS, tiles.next_power_of_2(most_sharers * group))


def has_same_bits(tile_n: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tiles of 8 and of 64 columns give a query the same bits. On an H200 they do for 16-bit numbers and tiles
    of 64 tokens. (A head_dim of 256 has tiles of 32 tokens.) An fp8 cache, float32 and tiles of 32 add in another
    order. Cards of capability 8 have the same layouts of products, and those of 10 have others."""
    if device.type == "cpu":
        return True
    is_known = torch.cuda.get_device_capability(device)[0] in (8, 9)
    return is_known and dtype.itemsize == cache_dtype.itemsize == 2 and tile_n == 64


def pick(runner: Any, disable: bool | None) -> Cascade | None:
    """Finds the blocks that decode reads once for several sequences. disable: True: never; None: only where texts
    keep their bits; False: also where they do not, if its tiles fit. Returns None, too, if attention is torch's or all
    layers have a window."""
    config, dtype, kv_dtype, device = runner.config, runner.dtype, runner.kv_dtype, runner.device
    group = config.num_heads // config.num_kv_heads
    tile_n = tiles.decode_config(1, 2, group, config.head_dim, dtype, kv_dtype, device)["TILE_N"]
    fits = config.head_dim <= 128 and tiles.shared_memory(device) > tiles.LARGE_SHARED_MEMORY
    is_wanted = not disable and (disable is False and fits or has_same_bits(tile_n, dtype, kv_dtype, device))
    is_able = (runner.kernels.in_triton and 2 * group <= MAX_PREFIX_COLUMNS
               and not widest_window(config))
    return Cascade(runner.block_size, tile_n, group) if is_able and is_wanted else None


# --------------------------------------------------------------------------------------------------
# On the device
# --------------------------------------------------------------------------------------------------

class CascadeMetadata(NamedTuple):
    """model.AttentionMetadata, and a cascade."""
    max_query_len: int
    max_seq_len: int
    num_decodes: int | None
    query_tiles: Tensor | None
    cascade: tuple[Tensor, Tensor, int]  # entries [n, 4], num_common_tokens [num_seqs], columns of a tile of queries


class CascadeRunner(Runner):
    """A Runner whose decode steps may have a cascade. A step sends num_common_tokens and the entries as two more lists.
    """
    cascade: Cascade | None = None
    columns = 0  # of the step that is launched, or recorded, now

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cascade = pick(self, self.options.disable_cascade_attn)
        if self.cascade:
            self.kernels = self.kernels._replace(attention=partial(attention, self.kernels.attention))

    def read(self, step: engine.SchedulerOutput) -> StepInput:
        more = list[list[int]]()

        def arrange(ones: list[Part]) -> list[Part]:
            places: dict[engine.Sequence, list[Part]] = {}  # a sequence with drafts has several
            for place in ones:
                places.setdefault(place[0], []).append(place)
            order, entries, num_common, _ = self.cascade.find([(seq, len(places[seq])) for seq in places])
            more.extend([num_common, entries] if entries else ())
            return [place for seq, _ in order for place in places[seq]]

        batch = self.step_input.of(step, self.block_size, arrange if self.cascade else list)
        if more:
            batch.more = [more[0] + [0] * (len(batch.seqs) - len(more[0])), more[1]]
        return batch

    def _compute(self, batch: StepInput, more_tokens: list[int], needs: Any) -> Any:
        self.columns = prefix_columns(max(batch.more[1][1::4]), self.cascade.group) if batch.more else 0
        return super()._compute(batch, more_tokens, needs)

    def make_batch(self, sent: StepTensors, logits_indices: Tensor | None, sampling_places: Tensor | None,
                   metadata: Any) -> model.Batch:
        if sent.more:
            num_common_tokens, entries = sent.more
            metadata = CascadeMetadata(*metadata, (entries.view(-1, 4), num_common_tokens, self.columns))
        return super().make_batch(sent, logits_indices, sampling_places, metadata)

    def trial(self, batch: model.Batch) -> model.Batch:
        """With memory for the sums of splits."""
        if self.cascade and batch.metadata.max_query_len == 1:
            nothing = torch.zeros_like(batch.seq_lens)
            cascade = nothing.new_zeros(1, 4), nothing, MAX_PREFIX_COLUMNS
            batch.metadata = CascadeMetadata(*batch.metadata, cascade)
        return super().trial(batch)


def attention(plain: Callable[..., Tensor], *tensors: Any, cascade: tuple | None = None, **options: Any) -> Tensor:
    """`kernel.paged_attention`, whose decode has a cascade, if a step has one and the layer no window."""
    decode = partial(launch_decode, cascade) if cascade and not options.get("sliding_window") else None
    return plain(*tensors, decode=decode, **options)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py. The widest tile is tried at the start. Others compile at their first use, in half a second, unless
    all steps are to be warm."""
    from nanopaged.features.warmup import attend_padding, one_by_one
    most, ints = min(r.max_num_samples, tiles.MAX_DECODE_SIZE), partial(torch.zeros, dtype=torch.int32, device=r.device)
    for columns in [*PREFIX_STAGES][0 if r.options.warm_up else -1:]:
        tasks = [partial(attend_padding(r, count), max_query_len=1, max_seq_len=r.max_model_len,
                         cascade=(ints(1, 4), ints(count), columns)) for count in (2, max(2, most))]
        yield partial(one_by_one, tasks)  # both have the same prefix launch


# --------------------------------------------------------------------------------------------------
# The kernel
#
# The prefix launch computes the tiles that sequences have in common. A program takes the new tokens of all of them as
# its columns, as if they were one sequence's, and reads K and V once. The suffix launch computes the other tiles, and
# goes on from the sums of a split that the prefix launch has begun. merge_splits_kernel merges all splits.
# --------------------------------------------------------------------------------------------------

def launch_decode(cascade: tuple[Tensor, Tensor, int], launch: kernel.Launch, num_decodes: int,
                  max_seq_len: int) -> None:
    """`kernel.launch_decode` with a cascade."""
    (out, inputs, scales, strides, constants), (entries, num_common_tokens, columns) = launch, cascade
    q, k_cache, num_kv_heads = inputs[0], inputs[1], constants["KV_HEADS"]
    num_contexts, num_splits = num_decodes * num_kv_heads, tiles.split_bound(max_seq_len)
    sharing = programs_per_context(num_contexts, num_splits)
    sums = kernel.empty_sums(q, num_decodes, num_splits)
    of_suffix = tiles.decode_config(num_contexts, 2, constants["GROUP"], q.shape[2], q.dtype, k_cache.dtype, q.device)
    of_prefix = of_suffix | dict(TILE_M=columns, num_stages=PREFIX_STAGES[columns])
    for is_prefix, work, grid, config in (
            (True, entries, (len(entries) * num_kv_heads, num_splits), of_prefix),
            (False, num_common_tokens, (num_contexts, sharing), of_suffix)):
        cascade_kernel[grid](
            out, *sums, *inputs[:-1], work, *scales, num_splits, *strides, PREFIX=is_prefix,
            ONE_SPLIT=grid[1] == num_splits, **constants, **config, **launch_options(q.device))
    kernel.merge_splits(launch, sums, of_suffix["TILE_N"])


@jit
def cascade_kernel(out, split_acc, split_sums, q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, work,
                   scale, v_scale, num_splits, q_token, q_head, out_token, out_head, table_seq, KC_BLOCK: tl.constexpr,
                   KC_SLOT: tl.constexpr, KC_HEAD: tl.constexpr, VC_BLOCK: tl.constexpr, VC_SLOT: tl.constexpr,
                   VC_HEAD: tl.constexpr, PREFIX: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                   HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr,
                   TILE_N: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, ONE_SPLIT: tl.constexpr,
                   PDL: tl.constexpr):
    """The head of both launches; their loop is that of decode in chapter 1.

    PREFIX    grid (entry and kv head, split); work: the entries
    else      grid (sequence and kv head, programs that share its splits); work: num_common_tokens
    """
    kernel.wait_for_previous_kernel(PDL)
    kv_head, place = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    seq, num_seqs = place, 1
    if PREFIX:
        seq, num_seqs = tl.load(work + 4 * place), tl.load(work + 4 * place + 1)
        if num_seqs == 0:  # room in a recorded step
            return
    q_start, seq_len = tl.load(query_start_loc + seq).to(tl.int64), tl.load(seq_lens + seq)
    if tl.load(query_start_loc + seq + 1) - q_start != 1:  # a prompt, or padding
        return
    if PREFIX:
        start, end = tl.load(work + 4 * place + 2), tl.load(work + 4 * place + 3)
    else:
        start, end = tl.load(work + seq), seq_len
    split_len = kernel.split_length(seq_len, TILE_N)
    if ONE_SPLIT:
        if (start // split_len + tl.program_id(1)) * split_len >= end:
            return
    k, v = k_cache + kv_head.to(tl.int64) * KC_HEAD, v_cache + kv_head.to(tl.int64) * VC_HEAD
    queries = kernel.Queries(q, q_token, q_head, out, out_token, out_head, None, seq, kv_head, q_start, num_seqs, 0)
    keys = kernel.Keys(block_tables + seq.to(tl.int64) * table_seq, k, v, seq_len, start, end)
    # Columns: the GROUP heads of each sequence, then padding.
    column, dim, num_columns = tl.arange(0, TILE_M), tl.arange(0, DIM_PADDED), GROUP * num_seqs
    head = (seq.to(tl.int64) + column // GROUP) * KV_HEADS * GROUP + kv_head * GROUP + column % GROUP
    tile, _, _, _, _ = kernel.load_queries(
        queries, keys, column, kernel.Sizes(KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KC_BLOCK, KC_SLOT,
                                            VC_BLOCK, VC_SLOT, WINDOW, TILE_M, TILE_N, PRECISION))
    sums = kernel.initial_sums(DIM_PADDED, TILE_M, TILE_M)
    if not PREFIX:
        # The prefix launch may have stopped inside a split. The first program begins there, with the sums so far.
        resumes = (start % split_len > 0) & (tl.program_id(1) == 0)
        begun = column < tl.where(resumes, num_columns, 0)
        sums = kernel.load_sums(split_acc, split_sums, head * num_splits + start // split_len, begun, dim, HEAD_DIM)
    kernel.decode_splits(
        sums, tl.trans(tile), keys, split_acc, split_sums, head * num_splits, num_columns, scale, False, ONE_SPLIT,
        kernel.Sizes(KV_HEADS, GROUP, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, KC_BLOCK, KC_SLOT, VC_BLOCK, VC_SLOT, WINDOW,
                     TILE_M, TILE_N, PRECISION))
