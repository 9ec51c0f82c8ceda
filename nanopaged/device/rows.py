"""Batch rows: what the device keeps of each running sequence.

While a sequence runs it has a batch row: its block table, its last token, its sampling settings. A step sends the
changed entries of its rows as one message of integers. The sampled tokens stay on the device, too. With a lookahead
(graphs.py) the next step reads them there, so it can be launched before the host knows them.
"""
from typing import Any

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device import transfer
from nanopaged.device.sampler import SETTINGS_INTS, pack_settings
from nanopaged.weights.build import memory_for


class Rows:
    """Rows for num_seqs sequences of up to max_blocks blocks, and one more, which no sequence gets, for padding (CUDA
    graphs, trial steps). ValueError: too little memory."""

    def __init__(self, num_seqs: int, max_blocks: int, device: torch.device):
        ints: dict[str, Any] = dict(dtype=torch.int32, device=device)
        with memory_for(f"{device} has no memory for the block tables of {num_seqs} sequences of {max_blocks} blocks; "
                        "lower max_num_seqs or max_model_len"):
            # torch gathers rows faster if their size is a multiple of 16 bytes
            self.block_tables = torch.zeros(num_seqs + 1, (max_blocks + 3) // 4 * 4, **ints)
            self.last_tokens = torch.zeros(num_seqs + 1, **ints)
            self.settings = torch.zeros(num_seqs + 1, SETTINGS_INTS, **ints)
        self.device = device

    def send(self, seqs: list[engine.Sequence]) -> None:
        """Tell the device what is new in the rows of this step's sequences: entries of block tables, and the sampling
        settings of sequences that are new in their row. With tables of 4 entries in the rows:

            sequence    row   block_table   num_sent_blocks    cells     blocks
            A           2     [5, 7]        1                  9         7           7 is new at index 1: cell 2 * 4 + 1
            B           0     [3]           -1: new there      0         3           and B's settings
            C           1     [8, 6]        2                  none
        """
        width, new = self.block_tables.shape[1], list[engine.Sequence]()
        cells, blocks = list[int](), list[int]()
        for seq in seqs:
            table, num_sent = seq.block_table, seq.num_sent_blocks
            if num_sent < len(table):
                if num_sent < 0:
                    new.append(seq)
                    num_sent = 0
                first = seq.row * width
                cells += range(first + num_sent, first + len(table))
                blocks += [max(block, 0) for block in table[num_sent:]]  # block -1: no token attends to it any more
                seq.num_sent_blocks = len(table)
        self.write(cells, blocks, new)

    def write(self, cells: list[int], blocks: list[int], new: list[engine.Sequence] = []) -> None:
        """cells: where in block_tables.view(-1) entries are new; blocks: these entries"""
        if cells:
            settings = [number for seq in new for number in pack_settings(seq.sampling.params, seq.sampling.seed)]
            sent = transfer.send(self.device, [cells, blocks, [seq.row for seq in new], settings])
            self.block_tables.view(-1)[sent[0]] = sent[1]
            if new:
                self.settings[sent[2]] = sent[3].view(-1, SETTINGS_INTS)

    def with_last_tokens(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """input_ids [T] of a step, with the last tokens of these rows in place of -1. (The host has not read the step
        that samples them. Only sequences with a single new token have a -1, and these come first.)"""
        ones, rest = input_ids[:len(rows)], input_ids[len(rows):]
        ones = torch.where(ones < 0, self.last_tokens.index_select(0, rows), ones)
        return torch.cat([ones, rest]) if len(rest) else ones
