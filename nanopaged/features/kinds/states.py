"""The states of recurrent layers: short convolutions, state-space layers, gated delta nets.

Such a layer has no K and V. It keeps one **state** of a fixed size for a text: a step reads it, advances it by the
step's tokens, and writes it. A state cannot go back to an earlier token, and it is too large to keep one for every
block: in Granite 4 H it takes as much as the K and V of hundreds of tokens. So a few are kept, the **snapshots**, and a
text goes on from the deepest one that it finds.

**A slot is like a block.** The states of all these layers after some token are in one slot. A slot has a reference
count, a prefix key if it can be found, and a place in the free queue: `States` is a BlockManager. Each running text has
a **live** slot, which it alone holds. A step reads a text's state in its **source** and writes it into the live slot.
As a rule the two are the same slot. If the source is a snapshot, they are not. So a snapshot is never written again,
and nothing is ever copied.

A step passes positions whose states are worth keeping. It writes these, too, each into a slot of its own (a **mark**),
so a chunk is not cut for them. With block_size 4, a prompt of 14 tokens of which other texts had the first 8:

    tokens      source    live    marks                 found from the next step on, under the key of
    0 to 13     none      0       8 in 1, 12 in 2       8 (slot 1), 12 (slot 2)
    14          0         0
    15          0         0                             16 (slot 0)
    16          0         3
    17          3         3
    18          3         3
    19          3         3                             20 (slot 3), and 16 no more
    20          3         4

A text leaves three snapshots at most:

    branch    where the K and V that it found end, and no snapshot was: texts part there
    prompt    the last block's end before the prompt's last token, which the same prompt computes again for its logits
    newest    the last block's end at which a step has stopped; it replaces the one before

**When a snapshot can be found.** K and V of a block can be read in the step that computes them, because each layer
writes before it reads. A state cannot: a layer has it only when it has gone through the tokens. So a snapshot gets its
key when the next step begins (`publish`). With a lookahead a block's last token may be pending. The snapshot then waits
for the block's key (StatePart.waiting), and is lost if the text ends first.

**Room.** Live slots come first. A text is admitted if it gets one, and nothing else here makes a text wait, or takes
its place: a snapshot is kept if a slot is free that no text has yet to get. Without snapshots texts start over.

**Drafts** (drafts.py) may turn out to be wrong, and a state cannot go back. A step with drafts therefore keeps the
state after each of its tokens, in slots that no text has yet to get. Once the drafts are decided, the state after the
last right one is the source of the next step, and its slot the live one. The other slots are free again:

    tokens      source    live    the states after 20, 21, 22 and 23 tokens
    19          3         3       in slots 3, 4, 5, 6: the tokens at 20, 21 and 22 are drafts
    21          4         4       the first draft was right

**A failed step** may have advanced live states. Its texts start over, and what it was to keep is forgotten. Other
snapshots are intact. A forked text may have found one of that step, too, and starts over (recurrent.py). A slot that a
step reads stays held until the next step begins (`read`), so that no other text of that step writes there.
"""
import math
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from nanopaged import engine
from nanopaged.features.kinds import Kinds, Part

NONE = -1  # in place of a slot
MOST_MARKS = 2  # of a step and a text: branch and prompt


@dataclass(eq=False)
class StatePart(Part):
    """What a running text has of the slots. block_table stays empty."""
    live: int = NONE
    source: int = NONE  # of the next step; NONE: before all tokens
    waiting: dict[int, int] = field(default_factory=dict)  # depth in blocks -> slot: snapshots without a key yet
    newest: tuple[int, tuple] | None = None  # slot and key of that snapshot
    row: list[int] = field(default_factory=list)  # what the device is told: source, live, and marks: (position, slot)
    drafted: dict[int, int] = field(default_factory=dict)  # tokens -> slot: the states after undecided drafts
    is_sent: bool = True
    quiet_until: int = 0


class States(engine.BlockManager):
    """num_texts: those that run at once, at most; num_slots: theirs, and others for snapshots; unit: snapshots are kept
    after multiples of so many tokens, and of block_size"""
    part = StatePart

    def __init__(self, index: Kinds, num_texts: int, num_slots: int, unit: int = 1):
        super().__init__(num_slots, index.block_size, index.enable_prefix_caching)
        self.index, self.num_texts, self.num_running = index, num_texts, 0
        self.chunk, self.unit = unit, math.lcm(unit, self.block_size)
        self.num_kept = self.num_shortened = 0  # snapshots that could be found; texts that missed a deeper one
        self.read: list[int] = []  # slots that the last step reads, and held for it
        self.written: list[tuple[StatePart, int, tuple, bool]] = []  # snapshots without a key: .., slot, key, is newest
        self.offered: WeakKeyDictionary[engine.SchedulerOutput, list[int]] = WeakKeyDictionary()

    # ---- between steps

    def begin_step(self) -> engine.SchedulerOutput:
        self.publish()
        for slot in self.read:
            self._decref(slot)
        self.read = []
        return super().begin_step()

    def publish(self) -> None:
        """Let snapshots be found: the step that writes them is launched."""
        written, self.written = self.written, []
        for part, slot, key, is_newest in written:
            if part.newest and self.key_of_block.get(part.newest[0]) == part.newest[1]:
                self._forget(part.newest[0])
            part.newest = None
            if key not in self.prefix_cache:
                self.prefix_cache[key], self.key_of_block[slot] = (slot, 0), key
                part.newest = (slot, key) if is_newest else None
                self.num_kept += 1
            self._decref(slot)

    def take_back(self, step: engine.SchedulerOutput) -> None:
        """The step is not computed, and neither are the snapshots that it offered. (Some may be under keys that were
        known a step later than the states.)"""
        offered = self.offered.pop(step, [])
        for _, slot, _, _ in [entry for entry in self.written if entry[1] in offered]:
            self._decref(slot)
        self.written = [entry for entry in self.written if entry[1] not in offered]
        for slot in offered:
            self._forget(slot)

    # ---- admission

    def most_needed(self, seq: engine.Sequence, keys: list) -> float:
        return 0 if self.num_running < self.num_texts else math.inf

    def deepest(self, keys: list, seq: engine.Sequence) -> int:
        """The last token is computed again for its logits, so it must not be in the state."""
        depth = min(len(keys), (seq.num_tokens - 1) // self.block_size)
        while depth and (keys[depth - 1],) not in self.prefix_cache:
            depth -= 1
        return depth

    def resume(self, part: StatePart, keys: list) -> None:
        may_take_two = self._may_keep()
        self.num_running += 1
        found = min(part.branch, part.seq.num_tokens - 1) // self.unit * self.unit  # as far as a snapshot could reach
        self.num_shortened += len(keys) * self.block_size < found
        if keys:
            part.source = self.prefix_cache[keys[-1],][0]
            is_free = self.ref_counts[part.source] == 0
            self._incref(part.source)
            if is_free and not may_take_two:
                self.evict(part.source)  # no room for both: the snapshot becomes the live slot
                part.live = part.source
                return
        part.live = self._pop_free_block()

    def may_fork(self, parent: StatePart, child: engine.Sequence) -> bool:
        """No: a sample computes the prompt's last token again, and the parent's state has gone past it. The sample is
        queued like a new request, and goes on from the prompt's snapshot."""
        return False

    def fork(self, parent: StatePart, child: StatePart, num_blocks: int) -> None:
        """Never: see may_fork."""

    # ---- while a text runs

    def give_back(self, part: StatePart) -> None:
        """Nothing: a state keeps its size."""

    def needed(self, part: StatePart, end: int, are_drafts: bool = False) -> float:
        return math.inf if are_drafts and end - part.num_computed_tokens > self._num_spare() else 0

    def extend(self, part: StatePart, end: int, are_drafts: bool = False) -> None:
        """A step computes the text's tokens up to `end`."""
        if are_drafts:
            return self._extend_by_drafts(part, end)
        self._decide(part)
        part.row = [part.source, part.live]
        for depth in sorted(self._lasting(part)):
            if part.num_computed_tokens < depth * self.block_size < end and self._may_keep():
                part.waiting[depth] = slot = self._pop_free_block()
                part.row += [depth * self.block_size, slot]
        part.is_sent = False
        if part.source not in (NONE, part.live):
            self.read.append(part.source)
        part.source = part.live
        self._keep(part, end)
        part.quiet_until = end  # the device is told what the next step does, unless it does the same
        if part.row == [part.source, part.live]:
            part.quiet_until += self.unit - 1 - end % self.unit

    def _keep(self, part: StatePart, end: int) -> None:
        """The state after so many tokens is in the source: if it can be a snapshot, steps write into another slot."""
        if end % self.unit == 0 and self._may_keep():
            part.waiting[end // self.block_size] = part.source
            self._incref(part.source)
            part.live = self._pop_free_block()

    def _extend_by_drafts(self, part: StatePart, end: int) -> None:
        """The step that was to end with the state in `source` computes drafts, too."""
        known = part.num_computed_tokens
        part.drafted = {position: self._pop_free_block() for position in range(known + 1, end + 1)}
        kept = {known: part.source} | part.drafted
        part.row[1] = kept.pop(end)
        part.row += [number for entry in kept.items() for number in entry]
        part.is_sent, part.quiet_until = False, 0

    def _decide(self, part: StatePart) -> None:
        """Go on after the last right draft."""
        slot = part.drafted.pop(part.num_computed_tokens, NONE)
        for other in part.drafted.values():
            self._decref(other)
        part.drafted = {}
        if slot != NONE:
            for old in {part.live, part.source}:
                self._decref(old)
            part.source = part.live = slot
            self._keep(part, part.num_computed_tokens)

    def quiet_until(self, part: StatePart) -> int:
        return part.quiet_until

    def offer(self, part: StatePart, depth: int, key: int | str) -> None:
        slot = part.waiting.pop(depth, NONE)
        if slot != NONE:
            self.written.append((part, slot, (key,), depth not in self._lasting(part)))
            self.offered.setdefault(self.index.step, []).append(slot)

    def release(self, part: StatePart) -> None:
        self.num_running -= 1
        for slot in {part.live, part.source} - {NONE}:
            self._decref(slot)
        for slot in (*part.waiting.values(), *part.drafted.values()):
            self._decref(slot)

    def _lasting(self, part: StatePart) -> set[int]:
        """Part.lasting, of depths after which snapshots are kept."""
        in_unit = self.unit // self.block_size
        return {depth // in_unit * in_unit for depth in part.lasting(self.block_size)}

    # ---- single slots

    def _num_spare(self) -> int:
        """Free slots besides those of texts that have yet to come."""
        return self.num_free_blocks - self.num_texts + self.num_running

    def _may_keep(self) -> bool:
        """Whether a slot is left for a snapshot."""
        return self.enable_prefix_caching and self._num_spare() > 0

    def _forget(self, slot: int) -> None:
        """Nothing finds the slot any more."""
        self.evict(slot)
        if slot in self.free_queue:
            self.free_queue.move_to_end(slot, last=False)

    def _decref(self, slot: int) -> None:
        """A slot that nothing finds is used before the snapshots."""
        super()._decref(slot)
        if not self.ref_counts[slot] and slot not in self.key_of_block:
            self.free_queue.move_to_end(slot, last=False)
