"""Paging for layers of several kinds: some keep the K and V of all tokens, some those of a window.

In Gemma 3 five of six layers have a **sliding window**: a token attends to the last 1,024 tokens there, and nobody
reads older K and V again. But a block of chapter 3 has the K and V of every layer, so it stays for the sake of the
sixth. Here layers are put into **groups** of layers that are alike, and each group has blocks and block tables of its
own. What a window has left behind is given back, and the layers without a window keep what they need.

**One pool.** A block has the K and V of block_size tokens in a few layers, as many as a group has. All groups take
their blocks from one pool with one free queue, as if each text were several texts:

    Gemma 3 4B       5 layers that keep all    29 with a window of 1,024: groups of 5 5 5 5 5 4
    10,000 tokens    157 blocks of 64 tokens   6 x 17 blocks: 259 in all (if all groups kept all: 7 x 157 = 1,099)

So nothing decides beforehand how much memory each kind of layer gets. Many short texts fill the pool with blocks of all
groups, and a few long ones with blocks of layers that keep all. What was used longest ago is reused first, whoever used
it. Layers that keep all may need several groups, too (device.py, `group_layers`): their blocks have equal lifetimes.

**One index.** The BlockManager of chapter 3 has the first group. Its **prefix keys** stand for beginnings of texts,
whoever keeps something of them, and the other groups store their blocks under the same keys. In an empty pool with
block_size 4, a prompt of 12 tokens and one more token, group 1 with a window of 6:

    tokens          0 1 2 3      4 5 6 7      8 9 10 11    12
    prefix key              1            2            3
    first group     block 0      block 1      block 2      block 6      Sequence.block_table    0 1 2 6
    group 1         (block 3)    block 4      block 5      block 7      Part.block_table        -1 4 5 7

The token at position 12 attends to the positions 7 to 12 in group 1, so block 3 was given back before its step. It
keeps its key until it is reused. Now a text comes that begins with the same 12 tokens. It finds the keys 1, 2 and 3, as
in chapter 3, and then each group says after which of them it can go on:

    after key 3     the next position is 12, its window begins at 7       group 1 needs the blocks 4 and 5
    after key 2     the next position is 8, its window begins at 3        the blocks 3 and 4
    after key 1     the next position is 4, its window begins at 0        the block 3

The hit is the deepest key that suits all groups: key 3, so all 12 tokens are found. Had block 4 been reused meanwhile,
it would be key 1, and without block 3 there would be no hit. The tokens from there on are computed in all layers, also
where the first group has them, and then the windows can be found again.

**Which windows stay.** A text that goes on gives back a block for each block_size tokens and group, and soon these
would be all that the free queue has. But other texts are likely to go on from two places only: where this text has
parted from earlier ones, and where its prompt ends. The windows before these keep their turn in the queue, and other
blocks that are given back are reused first (windows.py). So the next turn of a chat, or the same question to the same
document, finds its beginning however long the answers are.

**Room.** A step extends all tables of a text or none, and what it needs is counted exactly, so that no text is
preempted for a block that nobody takes. Admission adds up what all groups need for the tokens that the text has: each
alone would let in too many. max_model_len is what fits beside the windows of all groups, so every text can run alone.

**Samples, beams, drafts.** A fork shares the blocks of all groups. A sample that starts late, when its parent's window
has moved on, is queued like a new request with its prompt. Drafts extend all tables and give nothing back, because the
last token of their step still attends to the whole window.

**Other kinds.** The index does not know what a kind of layer keeps. It asks each one to find, extend and give back, as
`Kind` says. A kind may keep something else than blocks, in a place of its own, as long as it stores it under the
index's keys.
"""
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanopaged import engine

NULL = -1  # in a block table: a block that left the window and was given back


@dataclass(eq=False)
class Part:
    """What one kind keeps of a running sequence."""
    seq: engine.Sequence
    branch: int  # tokens that the index found at admission: there the text parts from earlier ones
    block_table: list[int] = field(default_factory=list)
    num_null_blocks: int = 0  # leading entries of the table that are NULL

    def lasting(self, block_size: int) -> tuple[int, int]:
        """Depths, in blocks, from which other texts are likely to go on: where this text parts from earlier ones, and
        the last block's end before the prompt's last token, which the same prompt computes again for its logits."""
        return self.branch // block_size, (self.seq.num_prompt_tokens - 1) // block_size

    # ---- The cursors that BlockManager.allocate reads are the sequence's

    @property
    def num_computed_tokens(self) -> int:
        return self.seq.num_computed_tokens

    @property
    def num_found_tokens(self) -> int:
        return self.seq.num_found_tokens

    @property
    def num_sent_blocks(self) -> int:
        return self.seq.num_sent_blocks

    @num_sent_blocks.setter
    def num_sent_blocks(self, number: int) -> None:
        self.seq.num_sent_blocks = number


class Kind(Protocol):
    """What one kind of layer does when the index does something. keys[i] is the prefix key of a text's first i + 1
    blocks. Numbers of blocks are those of the pool; math.inf says that the kind has no room in a place of its own."""
    part: "type[Part]"
    def begin_step(self) -> Any: ...
    def take_back(self, step: engine.SchedulerOutput) -> None: ...  # the step is not computed
    def most_needed(self, seq: engine.Sequence, keys: list) -> float: ...  # blocks, from there on for all its tokens
    def deepest(self, keys: list, seq: engine.Sequence) -> int: ...  # the number of keys after which it can go on
    def resume(self, part: Part, keys: list) -> None: ...  # go on after these keys
    def may_fork(self, parent: Part, child: engine.Sequence) -> bool: ...
    def fork(self, parent: Part, child: Part, num_blocks: int) -> None: ...
    def give_back(self, part: Part) -> None: ...  # what the next token does not need
    def needed(self, part: Part, end: int, are_drafts: bool) -> float: ...  # blocks for the tokens up to `end`
    def extend(self, part: Part, end: int, are_drafts: bool) -> None: ...  # take them
    def quiet_until(self, part: Part) -> int: ...  # for tokens up to there nothing is taken or given back
    def offer(self, part: Part, depth: int, key: Any) -> None: ...  # the text's first `depth` blocks have this key
    def release(self, part: Part) -> None: ...
    def check_idle(self) -> None: ...


class Parts(dict[str, Part]):
    """The parts of a running sequence, by their kinds' names."""
    quiet_until = 0  # `allocate` has nothing to do for tokens up to there


class Kinds(engine.BlockManager):
    """The pool, the index with the first group's blocks, and the other kinds."""
    most_tokens: int  # of a step

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.kinds: dict[str, Kind] = {}

    def begin_step(self) -> engine.SchedulerOutput:
        for kind in self.kinds.values():
            kind.begin_step()
        return super().begin_step()

    def check_idle(self) -> None:
        super().check_idle()
        for kind in self.kinds.values():
            kind.check_idle()

    def take_back(self, step: engine.SchedulerOutput) -> None:
        super().take_back(step)
        for kind in self.kinds.values():
            kind.take_back(step)

    # ---- while a sequence runs

    def allocate(self, seq: Any, end: int) -> bool:
        if end <= seq.parts.quiet_until:  # most decode steps: no table changes
            return True
        for name, part in seq.parts.items():
            self.kinds[name].give_back(part)
        return self.extend(seq, end, are_drafts=False)

    def extend(self, seq: Any, end: int, are_drafts: bool = True) -> bool:
        """`allocate`, but nothing is given back."""
        parts = [(self.kinds[name], part) for name, part in seq.parts.items()]
        needed = self.num_missing(seq, end) + sum(kind.needed(part, end, are_drafts) for kind, part in parts)
        if needed > self.num_free_blocks:
            return False
        super().allocate(seq, end)
        for kind, part in parts:
            kind.extend(part, end, are_drafts)
        if end > seq.num_found_tokens:  # else nothing is written, and the last block may be one that others hold
            seq.parts.quiet_until = min(len(seq.block_table) * self.block_size,
                                        *(kind.quiet_until(part) for kind, part in parts))
        return True

    def num_missing(self, seq: Any, end: int) -> int:
        """Blocks that BlockManager.allocate takes for this table."""
        table, write_from = seq.block_table, max(seq.num_computed_tokens, seq.num_found_tokens)
        index = write_from // self.block_size
        must_copy = write_from < end and index < len(table) and self.ref_counts[table[index]] > 1
        return max(0, engine.cdiv(end, self.block_size) - len(table)) + must_copy

    def cache_full_blocks(self, seq: Any) -> None:
        key, first, size = seq.prefix_key, seq.num_keyed_blocks, self.block_size
        super().cache_full_blocks(seq)
        for index in range(first, seq.num_keyed_blocks):
            key = self.prefix_cache[key, tuple(seq.token_ids[index * size:(index + 1) * size])][1]
            for name, part in seq.parts.items():
                self.kinds[name].offer(part, index + 1, key)

    def free(self, seq: Any) -> None:
        super().free(seq)
        for name, part in vars(seq).get("parts", {}).items():
            self.kinds[name].release(part)
        seq.parts = Parts()

    # ---- admission

    def num_blocks_needed(self, seq: engine.Sequence, hit: engine.PrefixHit) -> Any:
        keys = self.keys_of(hit)
        return super().num_blocks_needed(seq, hit) + sum(kind.most_needed(seq, keys) for kind in self.kinds.values())

    def find_prefix(self, seq: engine.Sequence) -> engine.PrefixHit:
        """The longest beginning from which all kinds can go on."""
        hit, depth = super().find_prefix(seq), -1
        keys = self.keys_of(hit)
        while depth != len(keys):
            depth = len(keys)
            for kind in self.kinds.values():
                keys = keys[:kind.deepest(keys, seq)]
        return engine.PrefixHit(hit.blocks[:depth], depth * self.block_size, keys[-1] if keys else seq.root, depth)

    def keys_of(self, hit: engine.PrefixHit) -> list[Any]:
        """The prefix key after each block of a hit: the key that stands before the next block."""
        return [self.key_of_block[block][0] for block in hit.blocks[1:]] + [hit.prefix_key] * bool(hit.blocks)

    def start(self, seq: Any, hit: engine.PrefixHit) -> None:
        branch, keys = super().find_prefix(seq).num_tokens, self.keys_of(hit)
        super().start(seq, hit)
        seq.parts = Parts((name, kind.part(seq, branch)) for name, kind in self.kinds.items())
        for name, part in seq.parts.items():
            self.kinds[name].resume(part, keys)

    def fork(self, parent: Any, child: Any, hit: engine.PrefixHit) -> bool:
        """Share what the parent holds. False: some kind cannot."""
        if not all(kind.may_fork(parent.parts[name], child) for name, kind in self.kinds.items()):
            return False
        super().start(child, hit)
        child.parts = Parts((name, kind.part(child, hit.num_tokens)) for name, kind in self.kinds.items())
        parent.parts.quiet_until = 0  # its last block is not its own any more
        for name, kind in self.kinds.items():
            kind.fork(parent.parts[name], child.parts[name], len(hit.blocks))
        return True
