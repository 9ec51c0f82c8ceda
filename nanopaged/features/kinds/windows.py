"""Groups of layers with K and V beside the first group, whose layers keep all. Most of them have a sliding window.

Blocks before the window of a text's next token are given back while the text runs. Such a block can be found until it
is reused, but a text goes on from a key only if the whole window before it is there. So a long text must not push out
the windows from which others go on: of the blocks that it gives back, those in the windows of its `lasting` depths take
their turn in the free queue. The others are reused first, unless the pool still has blocks that nothing can find.
"""
from typing import Any

from nanopaged import engine
from nanopaged.features.kinds import NULL, Kinds, Part


class Group:
    """name: of the group; window: in tokens, 0: its layers keep all; most_tokens: of a step. The blocks are the
    pool's, and so are the copies that a step makes of them and the offers that it takes back if it fails."""
    part = Part

    def __init__(self, pool: Kinds, name: str, window: int, most_tokens: int):
        self.pool, self.name, self.window, self.block_size = pool, name, window, pool.block_size
        self.max_blocks_per_seq = max_blocks(window, most_tokens, pool.block_size)

    def num_blocks_before(self, position: int) -> int:
        """Leading blocks that the token at this position does not attend to."""
        return max(0, position - self.window + 1) // self.block_size if self.window else 0

    def begin_step(self) -> None:
        """Nothing: the pool does."""

    def take_back(self, step: engine.SchedulerOutput) -> None:
        """Nothing: the pool does."""

    def check_idle(self) -> None:
        """Nothing: the pool does."""

    # ---- admission

    def most_needed(self, seq: engine.Sequence, keys: list) -> float:
        first, cache, counts = self._first(len(keys), seq), self.pool.prefix_cache, self.pool.ref_counts
        num_held = sum(counts[cache[key, self.name][0]] > 0 for key in keys[first:])
        return min(engine.cdiv(seq.num_tokens, self.block_size) - first - num_held, self.max_blocks_per_seq)

    def deepest(self, keys: list, seq: engine.Sequence) -> int:
        depth = len(keys)
        while depth:
            missing = [index for index in range(self._first(depth, seq), depth)
                       if (keys[index], self.name) not in self.pool.prefix_cache]
            if not missing:
                break
            depth = missing[-1]  # every depth between has this block in its window, too
        return depth

    def resume(self, part: Part, keys: list) -> None:
        first = self._first(len(keys), part.seq)
        blocks = [self.pool.prefix_cache[key, self.name][0] for key in keys[first:]]
        self._hold(part, [NULL] * first + blocks, first)

    def _first(self, depth: int, seq: engine.Sequence) -> int:
        """The first block that a sequence needs which goes on after so many blocks. The last token is computed in any
        case, for its logits."""
        return self.num_blocks_before(min(depth * self.block_size, seq.num_tokens - 1))

    def may_fork(self, parent: Part, child: engine.Sequence) -> bool:
        """Whether the parent still has the window of the child's last token, which is the next one to be computed."""
        return parent.num_null_blocks <= self.num_blocks_before(child.num_tokens - 1)

    def fork(self, parent: Part, child: Part, num_blocks: int) -> None:
        self._hold(child, parent.block_table[:num_blocks], parent.num_null_blocks)

    def _hold(self, part: Part, table: list[int], num_null_blocks: int) -> None:
        part.block_table, part.num_null_blocks = table, num_null_blocks
        for block in table[num_null_blocks:]:
            self.pool._incref(block)

    # ---- while a sequence runs

    def give_back(self, part: Part) -> None:
        """The blocks before the window of the next token."""
        table, size, free = part.block_table, self.block_size, self.pool.free_queue
        for i in range(part.num_null_blocks, self.num_blocks_before(part.num_computed_tokens)):
            block, table[i] = table[i], NULL
            part.num_null_blocks = i + 1
            self.pool._decref(block)
            lasts = any(self.num_blocks_before(depth * size) <= i < depth for depth in part.lasting(size))
            if not lasts and block in free and next(iter(free)) in self.pool.key_of_block:  # no unused block is left
                free.move_to_end(block, last=False)

    def needed(self, part: Part, end: int, are_drafts: bool = False) -> int:
        return self.pool.num_missing(part, end)

    def extend(self, part: Any, end: int, are_drafts: bool = False) -> None:
        engine.BlockManager.allocate(self.pool, part, end)

    def quiet_until(self, part: Part) -> int:
        end = len(part.block_table) * self.block_size
        return min(end, (part.num_null_blocks + 1) * self.block_size + self.window - 1) if self.window else end

    def offer(self, part: Part, depth: int, key: Any) -> None:
        """Not a block that was given back before its last token was known, nor one that another block stands for."""
        block = part.block_table[depth - 1]
        if block != NULL and (key, self.name) not in self.pool.prefix_cache:
            self.pool._offer(block, (key, self.name))

    def release(self, part: Part) -> None:
        for block in reversed(part.block_table[part.num_null_blocks:]):
            self.pool._decref(block)


def max_blocks(window: int, most_tokens: int, block_size: int) -> float:
    """The most blocks that a group holds of one text: a window, which may begin inside a block, and a step's tokens."""
    return engine.cdiv(window + most_tokens, block_size) + 1 if window else float("inf")
