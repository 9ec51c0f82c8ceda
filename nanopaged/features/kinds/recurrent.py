"""The device's side of recurrent states: their slots, the batch rows, and what a layer reads of a batch.

Layers with attention have one group and one pool, as in chapter 3. Each other layer has its states in place of K and V:
tensors of float32, [slots, ..], such as the last inputs of a convolution. Slot 0 takes what nobody reads, and slot 1 is
the state before all tokens, which is zero. Behind them come the slots of `states.py`.

**A step** writes three states of each sequence: one after its last token, and two marks, which go to slot 0 if there
are none. So the sizes do not change, and a step can be recorded. A batch row has the slots:

    row    source, live, position of a mark, its slot, position, slot

With drafts (drafts.py) a sequence's last token and its drafts have a place each in the batch. They have the same row,
and here they are one place with several tokens again. Its states are marks, too, so rows are longer.
"""
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged import engine, kernel, model
from nanopaged.device import transfer
from nanopaged.device.pool import Pool
from nanopaged.device.rows import Rows
from nanopaged.device.runner import Runner, StepTensors
from nanopaged.features.kinds import Kinds
from nanopaged.features.kinds.states import MOST_MARKS, States
from nanopaged.options import default_feature, feature
from nanopaged.weights.build import memory_for

STATES = "states"  # the kind's name
NOBODYS, ZERO, FIRST = 0, 1, 2  # slots on the device; FIRST + states.NONE is ZERO
MOST_CHUNKED = 64  # sequences with several tokens that a recorded step has room for
MOST_FEW = 4  # see Work


# --------------------------------------------------------------------------------------------------
# The pool
# --------------------------------------------------------------------------------------------------

class StatesPool(Pool):
    """The blocks of the layers with attention, and the slots of the others.

    shapes: of the states of a layer; has_state: for each layer; num_texts: that run at once, at most; num_drafts: slots
    that at least are left for these; share: of the memory beside such slots, for snapshots
    """

    def __init__(self, shapes: list[tuple[int, ...]], has_state: list[bool], num_texts: int, num_drafts: int,
                 share: float, block_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device):
        super().__init__(has_state.count(False), block_shape, dtype, device)
        self.shapes, self.has_state, self.share = shapes, has_state, share
        self.num_texts, self.num_drafts = num_texts, num_drafts

    @property
    def slot_bytes(self) -> int:
        return 4 * self.has_state.count(True) * sum(torch.Size(shape).numel() for shape in self.shapes)

    def num_blocks_in(self, memory: int) -> int:
        """Live slots come first. But they take half of the memory at most: fewer texts run at once then."""
        self.num_texts = max(1, min(self.num_texts, memory // 2 // self.slot_bytes))
        left = max(0, memory - (self.num_texts + self.num_drafts) * self.slot_bytes)
        return int(left * (1 - self.share)) // self.block_bytes

    def num_slots(self, num_blocks: int) -> int:
        snapshots = int(num_blocks * self.block_bytes * self.share / (1 - self.share)) // self.slot_bytes
        return self.num_texts + self.num_drafts + (max(snapshots, 1 + MOST_MARKS) if self.share else 0)

    def allocate(self, num_blocks: int) -> Any:
        """Each layer's cache: K and V, or its states."""
        blocks, num_slots = iter(super().allocate(num_blocks)), self.num_slots(num_blocks)
        with memory_for(f"{num_slots} recurrent states need {num_slots * self.slot_bytes / 2**30:.2f} GiB, which "
                        f"{self.device} does not have; lower max_num_seqs or num_blocks"):
            return [(self._states(num_slots), None) if has_state else next(blocks) for has_state in self.has_state]

    def one_block(self, layer: int | None = None) -> Any:
        return super().one_block() if layer is None or not self.has_state[layer] else self._states(0)

    def _states(self, num_slots: int) -> list[Tensor]:
        return [torch.zeros(FIRST + num_slots, *shape, device=self.device) for shape in self.shapes]


# --------------------------------------------------------------------------------------------------
# The rows and the batch
# --------------------------------------------------------------------------------------------------

class StatesRows(Rows):
    """num_drafts: of a sequence, at most"""

    def __init__(self, num_seqs: int, max_blocks: int, device: torch.device, num_drafts: int = 0):
        super().__init__(num_seqs, max_blocks, device)
        self.empty = empty_row(num_drafts)
        self.slots = torch.tensor(self.empty, dtype=torch.int32, device=device).repeat(num_seqs + 1, 1)

    def send(self, seqs: list[Any]) -> None:
        super().send(seqs)
        new = [seq for seq in dict.fromkeys(seqs) if not seq.parts[STATES].is_sent]
        if new:
            entries = [number for seq in new for number in self._row(seq.parts[STATES])]
            where, what = transfer.send(self.device, [[seq.row for seq in new], entries])
            self.slots[where] = what.view(-1, len(self.empty))

    def _row(self, part: Any) -> list[int]:
        part.is_sent, row = True, [*part.row]
        for i in (0, *range(1, len(row), 2)):  # slots
            row[i] += FIRST
        return row + self.empty[len(row):]


def empty_row(num_drafts: int = 0) -> list[int]:
    return [ZERO, NOBODYS] + [0, NOBODYS] * (MOST_MARKS + num_drafts)


class Work(NamedTuple):
    """What kernels compute in a step, in place of rounds. -1: room in a recorded step. Of sequences with several tokens
    there are lists [n, 2] int32 (None: the step has none of them):

        chunks    (sequence, number of the chunk in its text); those of a sequence one after another
        many      (sequence, its first entry of chunks), most chunks first
        few       the same in a step in which one sequence has most of the chunks. `many` is empty then
    """
    num_decodes: int  # the sequences with one token are among the first ones, so many
    chunks: Tensor | None = None
    many: Tensor | None = None
    few: Tensor | None = None


class StateSlots(NamedTuple):
    """What layers with states read of a batch. Sequence i brings the tokens first[i] to first[i] + lens[i] - 1."""
    first: Tensor  # [N]
    lens: Tensor  # [N] 0 at the places of drafts, whose tokens the place before them has
    num_computed: Tensor  # [N] the sequence's tokens before this step
    sources: Tensor  # [N] slots
    targets: Tensor  # [N * W] slots: of each sequence the live one, and marks
    counts: Tensor  # [N, W] the sequence's tokens of this step that the target's state has seen
    rounds: list[tuple[Tensor, Tensor, Tensor]] = []  # see `make_rounds`
    inputs: Tensor | None = None  # [T, length] of a convolution, the oldest first: indices of `convolve`'s inputs
    last_inputs: Tensor | None = None  # [N * W, length - 1] those that targets keep
    kernels: Any = None  # the module with the layers' kernels, if they are used
    work: Work | None = None
    most: int = 1  # tokens that a place computes one after the other, at most
    query_lens: Tensor | None = None  # [N] of attention: 1 at places whose tokens are; None: as lens


@dataclass
class StatesBatch(model.Batch):
    states: StateSlots


def make_rounds(query_lens: list[int], seq_lens: list[int], chunk: int) -> list[tuple[list[list[int]], ...]]:
    """A step's chunks of up to `chunk` tokens, which end at multiples of `chunk`. A round has the next chunk of each
    sequence with several tokens: [places], for each chunk its tokens in the flat batch, -1 behind the last one, and
    [how many of the sequence's tokens are done then]. With a chunk of 4, lens 1 and 7, and 2 tokens before these 7:

        place 1, tokens 1 2 -1 -1, done 2      place 1, tokens 3 4 5 6, done 6      place 1, token 7 -1 -1 -1, done 7
    """
    starts, rounds = [0, *accumulate(query_lens)], list[tuple[list, list, list]]()
    for place, (num_tokens, seq_len) in enumerate(zip(query_lens, seq_lens)):
        done, number = 0, 0
        while num_tokens > 1 and done < num_tokens:
            count = min(chunk - (seq_len - num_tokens + done) % chunk, num_tokens - done)
            tokens = range(starts[place] + done, starts[place] + done + count)
            done += count
            if number == len(rounds):
                rounds.append(([], [], []))
            for numbers, new in zip(rounds[number], ([place], [*tokens, *[-1] * (chunk - count)], [done])):
                numbers += new
            number += 1
    return rounds


def num_chunked(num_tokens: int, num_seqs: int) -> int:
    """The sequences with several tokens that a recorded step of this size has room for."""
    return max(1, min(num_tokens // 2, num_seqs, MOST_CHUNKED))


def work_layout(num_tokens: int, num_seqs: int, chunk: int) -> list[int]:
    """The lengths of Work's lists with room for num_seqs sequences with several tokens."""
    return [num_tokens // chunk + num_seqs, num_seqs, MOST_FEW]


def make_work(query_lens: list[int], seq_lens: list[int], chunk: int) -> tuple[list[list[int]], ...]:
    """Work's lists. With a chunk of 4, lens 1 and 7, and 2 tokens before these 7, chunks are 1 0, 1 1 and 1 2."""
    chunks, sequences = list[list[int]](), list[tuple[int, int, int]]()
    for place, (num_tokens, seq_len) in enumerate(zip(query_lens, seq_lens)):
        if num_tokens > 1:
            numbers = range((seq_len - num_tokens) // chunk, engine.cdiv(seq_len, chunk))
            sequences.append((-len(numbers), place, len(chunks)))
            chunks += [[place, number] for number in numbers]
    sequences.sort()
    lists = [[place, entry] for _, place, entry in sequences]
    # More programs share a state then, or most of the card would be idle. With equal sequences that is slower.
    is_few = bool(lists) and len(lists) <= MOST_FEW and len(chunks) < -1.5 * sequences[0][0]
    return (chunks, [], lists) if is_few else (chunks, lists, [])


def pad_lists(lists: Iterable[list[list[int]]], layout: list[int]) -> Tensor:
    """Lists of pairs one behind another, [n, 2] int32 on the host; each is padded with -1 to its length in the layout.
    """
    parts = [part + [[-1, -1]] * (length - len(part)) for part, length in zip(lists, layout, strict=True)]
    return torch.tensor([*chain(*parts)], dtype=torch.int32).view(-1, 2)


def state_slots(query_start_loc: Tensor, seq_lens: Tensor, rows: Tensor, places: Tensor | None = None,
                **plan: Any) -> StateSlots:
    """rows: of the sequences, as StatesRows.empty; places: where they are in StatesRows.slots, if some may have drafts;
    plan: more of StateSlots"""
    first, lens, targets = query_start_loc[:-1], query_start_loc.diff(), rows[:, 1::2]
    num_computed = seq_lens - lens
    marked = (rows[:, 2::2] - num_computed[:, None]).clamp(min=0)
    if places is not None:
        plan["query_lens"], (first, lens) = lens, join_drafts(places, first, lens)
        targets, marked = (one * (lens > 0)[:, None] for one in (targets, marked))  # NOBODYS is 0
    return StateSlots(first, lens, num_computed, rows[:, 0], targets.flatten(), torch.cat([lens[:, None], marked], 1),
                      **plan)


def join_drafts(places: Tensor, first: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Of neighbours with the same row the first one has all tokens. The others have none, and begin behind these."""
    is_head = F.pad(places[1:] != places[:-1], (1, 0), value=True)
    group, none = is_head.cumsum(0) - 1, torch.zeros_like(lens)
    total, start = (none.index_add(0, group, one)[group] for one in (lens, first * is_head))
    return torch.where(is_head, first, start + total), total * is_head


def with_states(batch: model.Batch, slots: StateSlots, length: int) -> StatesBatch:
    """length: tokens of a convolution in torch, or 0"""
    slots = with_inputs(slots, len(batch.input_ids), length) if length else slots
    return StatesBatch(*(getattr(batch, one.name) for one in fields(model.Batch)), slots)


def with_inputs(slots: StateSlots, num_tokens: int, length: int) -> StateSlots:
    """The same with what a convolution reads that is computed in torch."""
    first, lens, counts = slots.first, slots.lens, slots.counts
    token = torch.arange(num_tokens, dtype=torch.int32, device=first.device)
    # The last place takes the padding behind its tokens.
    place = torch.bucketize(token, first + lens, right=True, out_int32=True).clamp(max=len(lens) - 1)
    back = torch.arange(length - 1, -1, -1, dtype=torch.int32, device=first.device)  # tokens before another one

    def inputs(place: Tensor, index: Tensor) -> Tensor:
        """Of a window that ends at this token of a place's tokens: in this step's inputs, or in its state's."""
        at = index[..., None] - back
        new, old = (length - 1) * len(lens) + first[place][..., None] + at, (length - 1) * (place[..., None] + 1) + at
        return torch.where(at < 0, old, new)

    places = torch.arange(len(lens), dtype=torch.int32, device=first.device)[:, None]
    kept = inputs(places, counts - 1)[..., 1:].flatten(0, 1)
    return slots._replace(inputs=inputs(place, token - first[place]), last_inputs=kept)


def convolve(u: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, s: StateSlots) -> Tensor:
    """A causal convolution of each number of a vector by itself: u [T, D] -> [T, D]. states [slots, length - 1, D]: the
    inputs before the step's, which are replaced by the last ones. weight [D, 1, length]"""
    inputs = torch.cat([states.index_select(0, s.sources).flatten(0, 1).to(u.dtype), u])
    states[s.targets] = inputs[s.last_inputs].to(states.dtype)
    o = torch.einsum("tld,dl->td", inputs[s.inputs], weight[:, 0])
    return o if bias is None else o + bias


def pick_kernels(config: model.ModelConfig, modules: model.Modules, dtype: torch.dtype, device: torch.device) -> Any:
    """The module that config.states["kernels"] names, beside small kernels (fused.py), and if it can run here."""
    if "kernels" in config.states and modules.norm is not model.PLAIN.norm:
        module = default_feature(config.states["kernels"], "a recurrence in plain torch, which is slower,")
        return module if module and module.fits(config.states["shapes"], dtype, device) else None
    return None


class StatesRunner(Runner):
    rows: StatesRows
    pool: StatesPool
    splits_chunks = False  # see graphs.py

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        c, pool = self.config, self.pool
        self.pool = StatesPool(c.states["shapes"], [layer in c.states["layers"] for layer in range(c.num_layers)],
                               self.max_num_seqs, self.num_drafts,
                               self.options.enable_prefix_caching * self.options.snapshot_memory,
                               pool.block_shape, pool.dtype, pool.device)
        self.most = 1 + self.num_drafts  # tokens that a place computes one after the other
        self.state_kernels = pick_kernels(c, self.modules, self.dtype, self.device)

    def _make_rows(self) -> Rows:
        max_blocks = engine.cdiv(self.max_model_len, self.block_size)
        return StatesRows(self.max_num_seqs, max_blocks, self.device, self.num_drafts)

    @property
    def num_drafts(self) -> int:
        """Of a sequence, at most."""
        config = self.options.speculative_config
        drafts = config and feature("drafts", "speculative_config")
        return drafts.Drafting(config, self.config.vocab_size).num_tokens if drafts else 0

    def metadata(self, query_lens: list[int], seq_lens: list[int]) -> model.AttentionMetadata:
        """The chunks of the step are planned on the host, which knows the lengths."""
        self.lens = query_lens, seq_lens
        return super().metadata(query_lens, seq_lens)

    def make_batch(self, sent: StepTensors, logits_indices: Tensor | None, sampling_places: Tensor | None,
                   metadata: model.AttentionMetadata) -> model.Batch:
        chunk, length, plan = self.config.states["unit"], self.config.states["length"], dict[str, Any]()
        if self.state_kernels:
            length, plan = 0, dict(kernels=self.state_kernels, work=Work(metadata.num_decodes))
            if metadata.max_query_len > 1:
                num_tiles = super().num_query_tiles(len(sent.input_ids), len(sent.rows))
                tiles, lists = metadata.query_tiles[:num_tiles], metadata.query_tiles[num_tiles:]
                num_more = len(sent.input_ids) // chunk + MOST_FEW
                layout = work_layout(len(sent.input_ids), (len(lists) - num_more) // 2, chunk)
                plan["work"] = Work(metadata.num_decodes, *lists.split(layout))
                metadata = metadata._replace(query_tiles=tiles)
        elif chunk > 1 and metadata.max_query_len > 1:
            rounds = make_rounds(*self.lens, chunk)
            sent_plan = iter(self.send([numbers for one in rounds for numbers in one]))
            plan = dict(rounds=[(places, tokens.view(-1, chunk), done)
                                for places, tokens, done in zip(*[sent_plan] * 3)])
        batch = super().make_batch(sent, logits_indices, sampling_places, metadata)
        rows = self.rows.slots.index_select(0, sent.rows)
        places = dict(places=sent.rows, most=self.most) if self.most > 1 else {}
        return with_states(batch, state_slots(batch.query_start_loc, batch.seq_lens, rows, **places, **plan), length)

    # ---- Recorded steps (graphs.py). Work lists of kernels stand behind that of attention

    def shapes(self) -> list:
        """Without those with rounds, whose number differs."""
        shapes: list = super().shapes()  # type: ignore[misc]
        has_rounds = self.config.states["unit"] > 1 and not self.state_kernels
        return [one for one in shapes if not one.num_tiles] if has_rounds else shapes

    def graph_shape(self, query_lens: list[int], seq_lens: list[int]) -> Any:
        """None, too, for more chunks than a recorded step has room for."""
        shape = super().graph_shape(query_lens, seq_lens)  # type: ignore[misc]
        if shape and shape.num_tiles and self.state_kernels:
            needed = self.num_needed(make_work(query_lens, seq_lens, self.config.states["unit"]), shape.num_tokens)
            return shape if needed <= num_chunked(*shape[:2]) else None
        return shape

    def num_query_tiles(self, num_tokens: int, num_seqs: int) -> int:
        count = super().num_query_tiles(num_tokens, num_seqs)
        layout = work_layout(num_tokens, num_chunked(num_tokens, num_seqs), self.config.states["unit"])
        return count + sum(layout) * bool(self.state_kernels)

    def make_query_tiles(self, query_lens: list[int], seq_lens: list[int], num_tokens: int, num_seqs: int) -> Tensor:
        tiles = super().make_query_tiles(query_lens, seq_lens, num_tokens, num_seqs)
        if not self.state_kernels or max(query_lens) == 1:
            return tiles
        chunk = self.config.states["unit"]
        work = make_work(query_lens, seq_lens, chunk)
        room = max(num_chunked(num_tokens, num_seqs), self.num_needed(work, num_tokens))
        layout = [super().num_query_tiles(num_tokens, num_seqs), *work_layout(num_tokens, room, chunk)]
        return pad_lists([tiles.tolist(), *work], layout)

    def num_needed(self, work: tuple[list[list[int]], ...], num_tokens: int) -> int:
        """The room, in sequences with several tokens, that a step of num_tokens tokens must have for these lists."""
        chunks, many, few = work
        return max(len(many), len(few), len(chunks) - num_tokens // self.config.states["unit"])

    def trial(self, batch: model.Batch) -> model.Batch:
        """With memory for all chunks that a recorded step has room for."""
        slots = batch.states
        if slots.work and slots.work.chunks is not None:
            most, *_ = work_layout(len(batch.input_ids), MOST_CHUNKED, self.config.states["unit"])
            chunks = slots.work.chunks
            chunks = F.pad(chunks, (0, 0, 0, max(0, most - len(chunks))), value=-1)
            batch.states = slots._replace(work=slots.work._replace(chunks=chunks))
        return super().trial(batch)


# --------------------------------------------------------------------------------------------------
# The layers
# --------------------------------------------------------------------------------------------------

class Convolution(nn.Module):
    """The parameters of `convolve`."""

    def __init__(self, size: int, length: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, 1, length))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None


class StateLayer(model.Layer):
    """A layer with states in place of K and V: `make` makes its modules, out_proj among them, and `mix` computes what
    out_proj gets."""
    is_short = False  # its `attention` returns the rows whose logits are read

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        nn.Module.__init__(self)
        self.config, c, m = config, config, modules
        self.input_layernorm, self.post_attention_layernorm = m.norm(c, c.hidden_size), m.norm(c, c.hidden_size)
        self.attention_post_norm = self.mlp_post_norm = nn.Identity()
        self.make(c, m)
        self.mlp = m.mlp(c, index, m)

    def make(self, config: model.ModelConfig, modules: model.Modules) -> None:
        raise NotImplementedError

    def mix(self, x: Tensor, states: list[Tensor], slots: StateSlots) -> Tensor:
        """[T, D] -> [T, ..]"""
        raise NotImplementedError

    def attention(self, x: Tensor, rope: Tensor | None, batch: Any, cache: Any, kernels: kernel.Kernels) -> Any:
        o = self.mix(x, cache[0], batch.states)
        return self.out_proj(model.select_rows(o, batch) if self.is_short else o)


def with_state_layers(modules: model.Modules, config: model.ModelConfig) -> model.Modules:
    """The modules, with the family's layers where config.states has them."""
    def choose(base: type[model.Layer]) -> Callable[..., model.Layer]:
        # as in last_layer.py; qwen3_5.py says it of its layers
        is_short = getattr(base, "is_short", base.attention is not model.Layer.attention)
        layer = type(f"{base.__name__}WithStates", (config.states["layer"], base), {"is_short": is_short})
        return lambda c, i, m: (layer if i in c.states["layers"] else base)(c, i, m)
    return modules._replace(layer=choose(modules.layer), last_layer=choose(modules.last_layer))


# --------------------------------------------------------------------------------------------------
# The engine's parts
# --------------------------------------------------------------------------------------------------

def check(options: Any) -> None:
    """ValueError: an option that does not go with states."""
    if options.tensor_parallel_size > 1:
        raise ValueError("tensor_parallel_size cuts attention into heads, and a model with recurrent states has other "
                         "layers, too; use data_parallel_size, or one GPU")
    if options.swap_space:
        raise ValueError("swap_space moves K and V to the host, and the recurrent states of this model would be lost; "
                         "leave swap_space out")


def make_manager(options: Any, runner: Any, num_blocks: int, _: int) -> Kinds:
    manager = Kinds(num_blocks, runner.block_size, options.enable_prefix_caching)
    manager.most_tokens = options.max_num_batched_tokens
    pool = runner.pool
    if pool.num_texts < options.max_num_seqs:
        print(f"{pool.num_texts} texts run at once, not max_num_seqs {options.max_num_seqs}: the states of each take "
              f"{pool.slot_bytes / 2**20:.1f} MiB, and all of them may take half of the memory", file=sys.stderr)
    manager.kinds[STATES] = States(manager, pool.num_texts, pool.num_slots(num_blocks), runner.config.states["unit"])
    return manager


class StatesScheduler(engine.Scheduler):
    """At most as many texts run at once as there are live slots. A recurrence that is computed in chunks has the same
    bits only if it is cut where chunks end."""

    def __init__(self, manager: Any, max_num_seqs: int, max_num_batched_tokens: int):
        kind = manager.kinds[STATES]
        super().__init__(manager, min(max_num_seqs, kind.num_texts), max_num_batched_tokens)
        self.kind, self.chunk = kind, kind.chunk

    def _serve(self, seq: engine.Sequence, step: engine.SchedulerOutput) -> bool:
        """With less budget than new tokens, serve up to a multiple of `chunk`; not at all, if there is none, unless
        nobody else is served."""
        kept_back = 0
        if step.budget < seq.num_new_tokens and (num_behind := (seq.num_computed_tokens + step.budget) % self.chunk):
            if num_behind < step.budget:
                kept_back = num_behind
            elif step.seqs:
                return True
        step.budget -= kept_back
        is_served = super()._serve(seq, step)
        step.budget += kept_back
        return is_served

    def undo(self, step: engine.SchedulerOutput) -> None:
        """A text that was admitted to go on from what this step has written, but not served since, starts over, too."""
        slots, blocks = {*self.kind.offered.get(step, ())}, {*step.cached}
        super().undo(step)
        for seq in [seq for seq in self.running if seq.parts[STATES].source in slots or blocks & {*seq.block_table}]:
            self.release(seq)
            seq.status = engine.Status.WAITING
            self.add(seq)
