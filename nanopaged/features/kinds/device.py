"""The device's side of layers of several kinds: groups, the pool, the batch rows, and what a layer reads of a batch.

**A block's pieces.** All groups share the blocks of one pool, and each group reads them as K and V of its own layers.
Gemma 3 4B has 5 layers in a block. A **piece** is the K, or V, of block_size tokens in one layer. With heads of one
size the pool is an array [piece, block], so that each layer's cache is contiguous, as in other models:

    piece 0     K of a group's first layer     block 0, block 1, ..
    piece 1     V of that layer                block 0, block 1, ..
    piece 2     K of its second layer          block 0, block 1, ..

Where heads have several sizes the pool is an array of blocks, which groups cut into pieces of different sizes:

    block 0                             block 1                             block 2
    | K V | K V | K V | K V | K V |     | K V | K V | K V | K V | K V |     | K V | ..
      0 1   2 3   4 5   6 7   8 9         10 11  ..                           20 ..        pieces

The K of the group's second layer is piece 2 of each block. So this layer's K cache is the pool from piece 2 on, as if
each piece were a block of chapter 1, and the layer's K of block b is its entry 10 * b. The tables on the device have
these numbers in place of block ids.

**A step** has one table for each group and sequence, side by side in the sequence's batch row, and one launch computes
the slots of its tokens in all groups. The sizes do not change, so a step can be recorded.
"""
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged import engine, model, tiles
from nanopaged.device.pool import Pool
from nanopaged.device.rows import Rows
from nanopaged.device.runner import Runner, StepTensors
from nanopaged.features.kinds import Kinds
from nanopaged.features.kinds.slots import group_slots, group_slots_reference
from nanopaged.features.kinds.windows import Group, max_blocks

TABLE_COST = 0.02  # of a group: as much as so much more memory
FEWEST_TOKENS = 512  # of a step, as long as a text might fit better with fewer


# --------------------------------------------------------------------------------------------------
# Groups
# --------------------------------------------------------------------------------------------------

class Heads(NamedTuple):
    """Of a layer: its K and V of a token take 2 * size numbers."""
    num_kv_heads: int
    head_dim: int

    @property
    def size(self) -> int:
        return self.num_kv_heads * self.head_dim


def heads_of(config: model.ModelConfig) -> list[Heads]:
    """Of each layer."""
    heads = config.layer_heads or [(config.num_kv_heads, config.head_dim)] * config.num_layers
    return [Heads(*of_layer) for of_layer in heads]


def owners_of(config: model.ModelConfig) -> list[int]:
    """Of each layer: the layer whose K and V it reads. For one that reads another's the pool has nothing."""
    return config.kv_sharing or [*range(config.num_layers)]


def config_of(config: model.ModelConfig, layer: int) -> model.ModelConfig:
    """With the heads of this layer."""
    return replace(config, **heads_of(config)[layer]._asdict())


def choose(options: Any, config: model.ModelConfig) -> None:
    """Put the layers into groups (config.groups), if that saves memory. ValueError: an option that does not go with
    groups."""
    max_len = options.max_model_len or config.max_position_embeddings
    windows = [window if 0 < window < max_len else 0 for window in config.sliding_windows or [0] * config.num_layers]
    layers = list(zip(map(bool, windows), windows, heads_of(config)))
    owners = owners_of(config)
    if (config.layer_heads or config.kv_sharing) and options.tensor_parallel_size > 1:
        raise ValueError("tensor_parallel_size needs a model whose layers have heads of one size, and K and V of their "
                         "own")
    if not config.kv_sharing and (len(set(layers)) == 1 or all(windows) and not config.layer_heads):
        return
    if options.swap_space:
        raise ValueError("swap_space moves blocks of all layers at once, and the layers of this model keep different "
                         "ones, because some have a sliding window or other heads; leave swap_space out")
    if config.layer_heads or config.kv_sharing:
        options.disable_cascade_attn = True  # a cascade's tiles have one size of heads
    groups = dict(zip(sorted(set(owners)), group_layers([layers[layer] for layer in sorted(set(owners))])))
    config.groups = [groups[owner] for owner in owners]


def group_layers(layers: list[Any]) -> list[int]:
    """The group of each layer, given as (has a window, window, heads). Layers that are alike form groups, as many as
    fit into a block. A block is as large as wastes least: when all groups hold as much, as they do for short texts, and
    when those that keep all hold nearly everything, as for long ones.

        5 layers that keep all, 29 with a window    blocks of 5 layers    groups of 5, 5 5 5 5 5 4 (one is wasted)
        21 and 7                                    blocks of 7           groups of 7 7 7, 7
    """
    alike = {layer: layers.count(layer) for layer in sorted(set(layers))}  # those that keep all come first
    sizes = [heads.size for *_, heads in layers]
    unit, full = math.lcm(*sizes), [size for size, (has_window, *_) in zip(sizes, layers) if not has_window]

    def cost(block: int) -> float:
        groups = {layer: engine.cdiv(count, block // (2 * layer[2].size)) for layer, count in alike.items()}
        of_full = sum(count for (has_window, *_), count in groups.items() if not has_window)
        return (sum(groups.values()) * block / (2 * sum(sizes)) + of_full * block / (2 * sum(full) or 1)
                + TABLE_COST * sum(groups.values()))

    most = max(2 * layer[2].size * count for layer, count in alike.items())
    block = min(range(engine.cdiv(2 * max(sizes), unit) * unit, most + unit, unit), key=cost)
    groups, first = [0] * len(layers), 0
    for layer, count in alike.items():
        in_block = block // (2 * layer[2].size)
        for number, index in enumerate(index for index, other in enumerate(layers) if other == layer):
            groups[index] = first + number // in_block
        first += engine.cdiv(count, in_block)
    return groups


class Layout:
    """How layers share blocks. places[i]: of layer i in its group; first_layers[g]: the first layer of group g;
    num_pieces[g]: how many pieces of such a layer a block has room for; strides[g]: pieces from a block to the next"""

    def __init__(self, config: model.ModelConfig, block_size: int, dtype: torch.dtype):
        self.groups, self.heads, self.num_groups = config.groups, heads_of(config), max(config.groups) + 1
        self.block_size, self.dtype = block_size, dtype
        self.first_layers = [self.groups.index(group) for group in range(self.num_groups)]
        owners = owners_of(config)
        self.places = [len({layer for layer in owners[:owner] if self.groups[layer] == self.groups[owner]})
                       for owner in owners]
        sizes = [2 * sum(self.heads[layer].size for layer in set(owners) if self.groups[layer] == one)
                 for one in range(self.num_groups)]
        unit = math.lcm(*(heads.size for heads in self.heads))
        token_bytes = block_size * dtype.itemsize
        self.block_bytes = engine.cdiv(max(sizes), unit) * unit * token_bytes
        self.num_pieces = [self.block_bytes // (self.heads[layer].size * token_bytes) for layer in self.first_layers]
        # With heads of one size the pieces of a layer lie side by side, as in the pool of other models. A decode step
        # of 64 texts with Gemma 3 4B's shape (bench.py, `windows`) took 5.68 ms then on an H100, and 6.02 ms with
        # pieces block after block.
        self.is_uniform = len(set(self.heads)) == 1
        self.strides = [1] * self.num_groups if self.is_uniform else self.num_pieces
        self.model_bytes = sum(sizes) * token_bytes  # of block_size tokens in every layer


# --------------------------------------------------------------------------------------------------
# The pool
# --------------------------------------------------------------------------------------------------

class KindsPool(Pool):
    """A pool whose blocks serve all groups. Its size is given in blocks as of other models, of every layer."""
    block_dim = 0

    def __init__(self, layout: Layout, device: torch.device):
        self.layout = layout
        super().__init__(len(layout.groups), (layout.block_size, *layout.heads[0]), layout.dtype, device)

    @property
    def block_bytes(self) -> int:
        return self.layout.model_bytes

    def shape_of(self, layer: int) -> tuple[int, int, int]:
        return self.layout.block_size, *self.layout.heads[layer]

    def num_small(self, num_blocks: int) -> int:
        """The number of the pool's blocks in the memory of num_blocks blocks of every layer."""
        return max(self.layout.num_groups, num_blocks * self.block_bytes // self.layout.block_bytes)

    def allocate(self, num_blocks: int) -> Any:
        """The K and V cache of each layer."""
        layout, num_small = self.layout, self.num_small(num_blocks)
        if layout.is_uniform:
            self.block_dim = 1
            pool = self._empty(num_blocks, layout.num_pieces[0], num_small, *self.shape_of(0))
            self.blocks = pool.view(torch.uint8)
            return [(pool[2 * place], pool[2 * place + 1]) for place in layout.places]
        pool = self._empty(num_blocks, num_small, layout.block_bytes // layout.dtype.itemsize)
        self.blocks = pool.view(torch.uint8)
        pieces = [pool.view(-1, *self.shape_of(layer)) for layer in range(self.num_layers)]
        return [(of_layer[2 * place:], of_layer[2 * place + 1:]) for of_layer, place in zip(pieces, layout.places)]


# --------------------------------------------------------------------------------------------------
# The rows and the batch
# --------------------------------------------------------------------------------------------------

class KindsRows(Rows):
    """A row has a table for each group, one after another, of numbers of pieces: block * stride."""

    def __init__(self, strides: list[int], num_seqs: int, max_blocks: int, device: torch.device):
        # A multiple of 16: Triton then compiles the same kernel for a table's row here, and for a copy of the table.
        self.strides, self.table_size = strides, engine.cdiv(max_blocks, 16) * 16
        super().__init__(num_seqs, len(strides) * self.table_size, device)

    def send(self, seqs: list[Any]) -> None:
        width = self.block_tables.shape[1]
        cells: list[int] = []
        entries: list[int] = []
        new: list[engine.Sequence] = []
        for seq in seqs:
            first, end = seq.num_sent_blocks, len(seq.block_table)
            if first < end:  # the tables of all groups grow together
                if first < 0:
                    first = 0
                    new.append(seq)
                row = seq.row * width
                tables = seq.block_table, *(part.block_table for part in seq.parts.values())
                for table, stride in zip(tables, self.strides):
                    cells += range(row + first, row + end)
                    entries += [max(block, 0) * stride for block in table[first:]]
                    row += self.table_size
                seq.num_sent_blocks = end
        self.write(cells, entries, new)


def num_tiles(num_tokens: int, num_seqs: int, tokens_per_tile: int) -> int:
    """Of a step, at most."""
    return num_tokens // tokens_per_tile + num_seqs


@dataclass
class KindsBatch(model.Batch):
    groups: list[model.Batch]  # what the layers of each group read


class KindsRunner(Runner):
    rows: KindsRows
    pool: KindsPool

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.pool = KindsPool(self.layout, self.device)

    def _make_rows(self) -> Rows:
        self.layout = Layout(self.config, self.block_size, self.kv_dtype)
        return KindsRows(self.layout.strides, self.max_num_seqs, engine.cdiv(self.max_model_len, self.block_size),
                         self.device)

    def make_batch(self, sent: StepTensors, logits_indices: Tensor | None, sampling_places: Tensor | None,
                   metadata: Any) -> model.Batch:
        batch = super().make_batch(sent, logits_indices, sampling_places, metadata)
        tables = batch.block_tables.view(len(sent.rows), -1, self.rows.table_size)
        compute = group_slots if self.kernels.in_triton else group_slots_reference
        slots = compute(tables, sent.positions, sent.slot_mapping, sent.query_start_loc, self.block_size)
        # A cascade (features/cascade.py) is that of the first group's blocks.
        other = model.AttentionMetadata(*metadata[:len(model.AttentionMetadata._fields)])
        groups = [replace(batch, block_tables=tables[:, group], slot_mapping=slots[group],
                          metadata=other if group else batch.metadata) for group in range(len(slots))]
        if metadata.query_tiles is not None and metadata.max_query_len > 1 and len(self.tile_sizes) > 1:
            room = [num_tiles(len(sent.positions), len(sent.rows), tokens) for tokens in self.tile_sizes]
            work = dict(zip(self.tile_sizes, metadata.query_tiles.split(room)))
            for one, layer in zip(groups, self.layout.first_layers):
                one.metadata = one.metadata._replace(query_tiles=work[self.tile_of(layer)])
        return KindsBatch(*(getattr(batch, one.name) for one in fields(batch)), groups)

    # ---- Prefill's work lists. Heads of several sizes may have tiles of several sizes: one list behind another then

    def tile_of(self, layer: int) -> int:
        """Query tokens in a tile of this layer's prefill."""
        c = config_of(self.config, layer)
        return self.kernels.tokens_per_tile(c.num_heads // c.num_kv_heads, c.head_dim, self.block_size, self.dtype,
                                            self.kv_dtype, self.device)

    @cached_property
    def tile_sizes(self) -> list[int]:
        return sorted({*map(self.tile_of, self.layout.first_layers)})

    def num_query_tiles(self, num_tokens: int, num_seqs: int) -> int:
        return sum(num_tiles(num_tokens, num_seqs, tokens) for tokens in self.tile_sizes)

    def make_query_tiles(self, query_lens: list[int], seq_lens: list[int], num_tokens: int, num_seqs: int) -> Tensor:
        lists = [tiles.make_query_tiles(query_lens, seq_lens, tokens) for tokens in self.tile_sizes]
        if len(lists) == 1:
            return lists[0]
        return torch.cat([F.pad(work, (0, 0, 0, num_tiles(num_tokens, num_seqs, tokens) - len(work)), value=-1)
                          for work, tokens in zip(lists, self.tile_sizes)])

    def attention_shapes(self) -> Iterator[tuple[model.ModelConfig, Tensor]]:
        c, heads = self.config, self.layout.heads
        for one in sorted(set(heads)):
            layers = [layer for layer, other in enumerate(heads) if other == one]
            windows, ropes = ([each[i] for i in layers if each] for each in (c.sliding_windows, c.layer_ropes))
            config = replace(c, **one._asdict(), sliding_windows=windows, layer_ropes=ropes)
            yield config, self.pool.one_block(layers[0])

    def trial(self, batch: Any) -> model.Batch:
        batch = super().trial(batch)
        batch.groups[0].metadata = batch.metadata
        return batch


# --------------------------------------------------------------------------------------------------
# The parts
# --------------------------------------------------------------------------------------------------

def with_groups(modules: model.Modules) -> model.Modules:
    """The modules, with layers that read what their group has of a batch."""
    layers = (type(f"{kind.__name__}InGroup", (InGroup, kind), {}) for kind in (modules.layer, modules.last_layer))
    return modules._replace(**dict(zip(("layer", "last_layer"), layers)))


class InGroup(model.Layer):
    """A layer that reads the tables and slots of its group."""

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        super().__init__(config_of(config, index), index, modules)
        self.group = config.groups[index]

    def attention(self, x: Tensor, rope: Tensor | None, batch: Any, *more: Any) -> Tensor:
        return super().attention(x, rope, batch.groups[self.group], *more)


def make_manager(options: Any, runner: Any, num_blocks: int, _: int) -> Kinds:
    windows, num_blocks, most_tokens, _ = fit(options, runner, num_blocks)
    manager = Kinds(num_blocks, runner.block_size, options.enable_prefix_caching)
    manager.most_tokens = most_tokens
    manager.kinds = {f"group {number}": Group(manager, f"group {number}", window, most_tokens)
                     for number, window in enumerate(windows) if number}
    return manager


def longest_text(options: Any, runner: Any, size: int) -> int:
    """The most tokens of a text, in a pool of `size` tokens of every layer. ValueError: max_model_len is more."""
    windows, num_blocks, _, longest = fit(options, runner, size // runner.block_size)
    if (given := options.max_model_len) and longest < given:
        raise ValueError(f"max_model_len {given} is more than the {longest} tokens of a text that fit into the pool, "
                         f"{num_blocks} blocks of {runner.block_size} tokens for {len(windows)} groups of layers; "
                         "lower it or give the pool more memory")
    return longest


def fit(options: Any, runner: Any, num_blocks: int) -> tuple[list[int], int, int, int]:
    """(each group's window, the pool's blocks, the most tokens of a step, the most of a text). In each group a step's
    tokens need blocks beside a window, so a step has fewer tokens if longer texts are wanted than would fit then."""
    num_blocks, size = runner.pool.num_small(num_blocks), runner.block_size
    of_layers = runner.config.sliding_windows or [0] * runner.config.num_layers
    windows = [0] + [of_layers[layer] for layer in runner.pool.layout.first_layers[1:]]  # the index keeps all
    windows = [window if window < runner.max_model_len else 0 for window in windows]
    asked = options.max_num_batched_tokens
    fewer = [asked >> i for i in range(asked.bit_length()) if not i or asked >> i >= FEWEST_TOKENS]
    longest = {tokens: most_blocks(num_blocks, size, windows, tokens) * size for tokens in fewer}
    most_tokens = max(fewer, key=lambda tokens: (min(longest[tokens], runner.max_model_len), tokens))
    return windows, num_blocks, most_tokens, longest[most_tokens]


def most_blocks(num_blocks: int, block_size: int, windows: list[int], most_tokens: int) -> int:
    """The blocks of a text in each group that keeps all, at most."""
    most = [max_blocks(window, most_tokens, block_size) for window in windows]
    return bisect_right(range(num_blocks + 1), num_blocks, key=lambda depth: sum(min(depth, one) for one in most)) - 1
