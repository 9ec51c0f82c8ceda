"""One model on several GPUs: tensor parallelism (Shoeybi et al. 2019, Megatron-LM). Read it after runner.py.

N processes, the **ranks**, have a GPU each, and each has a part of every layer and of the pool. All ranks compute the
same step at the same time:

                     each rank has                      and then
    embed_tokens     a range of the vocabulary          the ranks' outputs are added up: other ranks' tokens count 0
    qkv_proj         a range of the heads               (a kv head is repeated where there are fewer than ranks)
    attention        these heads, and their K and V
    o_proj           the columns for these heads        the ranks' outputs are added up
    gate_up_proj     a range of the intermediate size
    down_proj        the columns for this range         the ranks' outputs are added up
    lm_head          a range of the vocabulary          rank 0 puts the logits together

Norms and the residual stream are the same on all ranks. **Rank 0** is the process of the engine. It has the scheduler,
the block manager and the sampler. The other ranks are **workers** (workers.py): they get each step as integers through
a pipe, and read the sampled tokens, which are inputs of the next step, in the memory of rank 0.

**Adding up.** Each rank writes its partial product into a shared buffer, which the others can read over NVLink. After a
barrier of 3 microseconds each rank adds the partial products in the order of ranks, so all have the same bits. With
fused.py the norm that follows adds them while it reads them. o_proj and down_proj have a buffer each. A rank writes a
buffer again only after the other buffer's barrier, which all ranks reach after they have read the first one.

GPUs that cannot read each other's memory send their partial products by NCCL instead. On CPUs the shared buffers are
mapped files, and the barrier is gloo's.
"""
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanopaged import engine, model
from nanopaged.device.runner import Runner, on_its_device
from nanopaged.device.sampler import SamplingNeeds
from nanopaged.tiles import cdiv

if TYPE_CHECKING:
    from nanopaged.device.workers import Workers

ALIGNMENT = 64  # a rank's part of the vocabulary and of the intermediate size is a multiple of it, padded with zeros
LOGITS_ROWS = 256  # rows of logits that are put together at once
FEWEST_ROWS = 1024  # of the buffers for sums: fp8 calibration, warm-up and split products take up to so many
FOREVER = timedelta(days=365)  # gloo waits that long: rank 0 watches the workers itself, and may be stopped (Ctrl-Z)
POLL_SECONDS = 20e-6


# --------------------------------------------------------------------------------------------------
# Buffers that all ranks can read
# --------------------------------------------------------------------------------------------------

class Peers:
    """The ranks of an engine, on CPUs. barriers_left: those that this rank still has to join in this forward pass."""

    def __init__(self, rank: int, size: int, device: torch.device, folder: str):
        self.rank, self.size, self.device, self.folder = rank, size, device, folder
        self.barriers_left = self.num_buffers = 0
        self.store = dist.FileStore(f"{folder}/store", size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = FOREVER, [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self.store), rank, size, options)

    def share(self, size: int, dtype: torch.dtype) -> "SharedBuffer":
        """A buffer of `size` numbers on each rank."""
        self.num_buffers += 1
        return SharedBuffer(self, self._map(f"{self.folder}/{self.num_buffers}", size, dtype))

    def _map(self, name: str, size: int, dtype: torch.dtype) -> list[Tensor]:
        def open_file(rank: int) -> Tensor:
            return torch.from_file(f"{name}.{rank}", shared=True, size=size, dtype=dtype)

        own = open_file(self.rank)
        self.barrier()
        return [own if rank == self.rank else open_file(rank) for rank in range(self.size)]

    def barrier(self) -> None:
        self.gloo.barrier().wait()

    def gather(self, parts: list[Tensor], count: int) -> list[Tensor]:
        """The first `count` numbers of all ranks, which all have written."""
        self.barriers_left -= 1
        self.barrier()
        return [part[:count] for part in parts]

    def catch_up(self) -> None:
        """This rank's forward pass has failed: join its other barriers, so that the other ranks can finish theirs."""
        while self.barriers_left > 0:
            self.barriers_left -= 1
            self.barrier()

    def agree(self, numbers: list[float], largest: bool) -> list[float]:
        """The largest (or smallest) of all ranks' numbers, one by one."""
        tensor, options = torch.tensor(numbers, dtype=torch.float64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
        self.gloo.allreduce([tensor], options).wait()
        return tensor.tolist()

    def release(self) -> None:
        """A peer has died: let the barriers under way end. (gloo's end by themselves.)"""


class GpuPeers(Peers):
    """GPUs that read each other's memory, through torch's symmetric memory."""

    def __init__(self, rank: int, size: int, device: torch.device, folder: str):
        super().__init__(rank, size, device, folder)
        self.group = folder  # a name that no other engine of this process has
        group = dist.ProcessGroup(self.store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._set_group_name(self.group)
        group._set_group_desc("nanopaged")
        torch._C._distributed_c10d._register_process_group(self.group, group)
        self.symmetric: Any = torch._C._distributed_c10d._SymmetricMemory
        self.symmetric.set_group_info(self.group, rank, size, dist.PrefixStore("symmetric", self.store))
        self.handles: list[Any] = []
        self.side_stream = torch.cuda.Stream(device)
        self.ones, self.zeros = (torch.full((size,), value, dtype=torch.int32, device=device) for value in (1, 0))

    def _map(self, name: str, size: int, dtype: torch.dtype) -> list[Tensor]:
        size = cdiv(size, ALIGNMENT) * ALIGNMENT
        own = self.symmetric.empty_strided_p2p((size,), (1,), dtype, self.device, self.group)
        self.handles.append(handle := self.symmetric.rendezvous(own, self.group))
        return [own if rank == self.rank else handle.get_buffer(rank, (size,), dtype) for rank in range(self.size)]

    def barrier(self) -> None:
        self.handles[0].barrier(channel=0)

    def release(self) -> None:
        """A rank in a barrier sets its signal on each peer, and waits for theirs on its own pad: stand in for them. The
        copies take no kernel, which could not be loaded while a barrier waits."""
        if self.handles:
            with torch.cuda.stream(self.side_stream):
                for rank in range(self.size):
                    pad = self.handles[0].get_signal_pad(rank, (self.size,), torch.int32)
                    for peer in range(self.size):
                        if rank == self.rank != peer:
                            pad[peer:peer + 1].copy_(self.ones[:1], non_blocking=True)
                        elif peer == self.rank != rank:
                            pad[peer:peer + 1].copy_(self.zeros[:1], non_blocking=True)


class NcclPeers(Peers):
    """GPUs that cannot read each other's memory."""

    def __init__(self, rank: int, size: int, device: torch.device, folder: str):
        super().__init__(rank, size, device, folder)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        self.nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self.store), rank, size, options)

    def _map(self, name: str, size: int, dtype: torch.dtype) -> list[Tensor]:
        own = torch.empty(size, dtype=dtype, device=self.device)
        return [own] * self.size

    def barrier(self) -> None:
        """Nobody reads another one's buffer."""

    def gather(self, parts: list[Tensor], count: int) -> list[Tensor]:
        gathered = parts[0].new_empty(self.size * count)
        self.nccl._allgather_base(gathered, parts[0][:count], dist.AllgatherOptions()).wait()
        return list(gathered.chunk(self.size))

    def release(self) -> None:
        self.nccl.abort()


def join_peers(rank: int, size: int, device: torch.device, folder: str) -> Peers:
    if device.type == "cpu":
        return Peers(rank, size, device, folder)
    # Multicast is left alone: not every machine that offers it can do it. Both are read when they are first needed.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    can_read = all(torch.cuda.can_device_access_peer(a, b) for a in range(size) for b in range(size) if a != b)
    return (GpuPeers if can_read else NcclPeers)(rank, size, device, folder)


class SharedBuffer:
    """A buffer on each rank. Each rank writes its own, and after `all` it may read all."""

    def __init__(self, peers: Peers, parts: list[Tensor]):
        self.peers, self.parts = peers, parts

    def own(self, *shape: int) -> Tensor:
        return self.parts[self.peers.rank][:_product(shape)].view(shape)

    def all(self, *shape: int) -> list[Tensor]:
        return [part.view(shape) for part in self.peers.gather(self.parts, _product(shape))]

    def sum(self, *shape: int) -> Tensor:
        return reduce(torch.add, self.all(*shape))  # in the order of ranks


def _product(shape: Iterable[int]) -> int:
    return reduce(int.__mul__, shape, 1)


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------

class RowParallelLinear(model.Linear):
    """A rank's columns of the matrix. fused.py has its own form."""
    buffer: SharedBuffer

    def forward(self, x: Tensor) -> Tensor:
        shape = len(x), len(self.weight)
        own = torch.matmul(x, self.weight.T, out=self.buffer.own(*shape))
        if self.bias is not None:
            own += self.bias
        return self.buffer.sum(*shape)


class VocabParallelEmbedding(model.Embedding):
    """A rank's rows of the table."""
    buffer: SharedBuffer

    def forward(self, ids: Tensor) -> Tensor:
        size, shape = len(self.weight), (len(ids), self.weight.shape[1])
        local = ids - self.buffer.peers.rank * size
        is_elsewhere = (local < 0) | (local >= size)
        found = F.embedding(local.clamp(0, size - 1), self.weight)
        self.buffer.own(*shape).copy_(found.masked_fill_(is_elsewhere[:, None], 0))
        return self.buffer.sum(*shape)


class ParallelTransformer(model.Transformer):
    """A rank's part of the decoder. whole: the settings of all of it; sums: buffers for o_proj and down_proj."""

    def __init__(self, config: model.ModelConfig, whole: model.ModelConfig, sums: list[SharedBuffer],
                 logits_buffer: SharedBuffer):
        super().__init__(config)
        self.whole, self.logits_buffer, self.peers = whole, logits_buffer, logits_buffer.peers
        for layer in self.layers:
            for module, buffer in zip((layer.o_proj, layer.down_proj), sums):
                module.__class__, module.buffer = RowParallelLinear, buffer
        self.embed_tokens.__class__, self.embed_tokens.buffer = VocabParallelEmbedding, sums[1]
        self.cuts = find_cuts(whole, config, self.peers.rank, self.peers.size)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        shape, cut = self.cuts[name]
        if tensor.shape != shape:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(shape)}")
        return cut(tensor)

    def num_barriers(self, num_logits: int) -> int:
        """Of a forward pass: for the sampled tokens, the embedding, two in each layer, and the logits. The last layer
        has none if no row needs logits."""
        rounds = cdiv(num_logits, LOGITS_ROWS)
        return 2 + 2 * len(self.layers) + max(0, 2 * rounds - 1) - 2 * (num_logits == 0)

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, D] -> [R, vocab_size] on rank 0, and no columns on the others."""
        weight, size = self.lm_head.weight, self.whole.vocab_size
        if self.peers.rank:
            out = x.new_empty(len(x), 0)
        elif out is None:
            out = x.new_empty(len(x), size)
        for start in range(0, len(x), LOGITS_ROWS):
            rows = x[start:start + LOGITS_ROWS]
            if start:
                self.logits_buffer.all(1)  # rank 0 has read the rows before
            torch.matmul(rows, weight.T, out=self.logits_buffer.own(len(rows), len(weight)))
            parts = self.logits_buffer.all(len(rows), len(weight))
            if self.peers.rank == 0:
                ends = [min(size, len(weight) * (rank + 1)) - len(weight) * rank for rank in range(self.peers.size)]
                torch.cat([part[:, :max(0, end)] for part, end in zip(parts, ends)], 1,
                          out=out[start:start + len(rows)])
        return out


def split_config(config: model.ModelConfig, size: int) -> model.ModelConfig:
    """A rank's settings, with the whole vocabulary. ValueError: the heads cannot be split evenly."""
    def fits(size: int) -> bool:
        return config.num_heads % size == 0 and 0 in (config.num_kv_heads % size, size % config.num_kv_heads)

    if not fits(size):
        sizes = ", ".join(str(n) for n in range(1, config.num_heads + 1) if fits(n))
        raise ValueError(f"tensor_parallel_size {size} cannot split {config.num_heads} query heads and "
                         f"{config.num_kv_heads} kv heads evenly; sizes that can are {sizes}")
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=max(1, config.num_kv_heads // size),
                   intermediate_size=padded_part(config.intermediate_size, size))


def padded_part(whole: int, size: int) -> int:
    return cdiv(cdiv(whole, size), ALIGNMENT) * ALIGNMENT


def find_cuts(whole: model.ModelConfig, config: model.ModelConfig, rank: int, size: int) -> dict[str, tuple]:
    """For each of a checkpoint's tensors its shape, and a function that cuts out this rank's part. What differs between
    the whole model's shapes and a rank's tells along which dimension a tensor is split."""
    with torch.device("meta"):
        models = model.Transformer(whole), model.Transformer(config)
    cuts: dict[str, tuple] = {}
    for (name, own_all), (_, own_part) in zip(*(one.named_parameters() for one in models)):
        tensors = model.checkpoint_tensors(name, own_all, whole)
        parts = model.checkpoint_tensors(name, own_part, config).values()
        for i, ((theirs, tensor), part) in enumerate(zip(tensors.items(), parts)):
            heads = 3 if "qkv_proj" in name and len(tensors) == 1 else 1  # GPT-2's q, k and v in one matrix
            start = rank * whole.num_kv_heads // size * config.head_dim if "qkv_proj" in name and i else None
            is_bias_of_sum = rank > 0 and name.endswith(("o_proj.bias", "down_proj.bias"))  # rank 0 adds it
            cut = torch.zeros_like if is_bias_of_sum else partial(cut_out, part.shape, rank, start, heads)
            cuts[theirs] = tensor.shape, cut
    return cuts


def cut_out(shape: torch.Size, rank: int, start: int | None, merged: int, tensor: Tensor) -> Tensor:
    """The part of this shape, padded with zeros. start: where it begins; None: after the parts of the ranks before."""
    if merged > 1:
        shape = torch.Size([shape[0] // merged, *shape[1:]])
        return torch.cat([cut_out(shape, rank, start, 1, third) for third in tensor.chunk(merged)])
    for dim, (size, length) in enumerate(zip(tensor.shape, shape)):
        if size != length:
            first = min(size, rank * length if start is None else start)
            tensor = tensor.narrow(dim, first, min(length, size - first))
            padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, length - tensor.shape[dim]]
            return F.pad(tensor, padding) if padding[-1] else tensor
    return tensor


def random_tensors(config: model.ModelConfig, dtype: torch.dtype,
                   device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The random weights that one device would have, as a checkpoint's tensors."""
    with torch.device("meta"):
        whole = model.Transformer(config)
    for name, parameter in whole.named_parameters():
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        model.init_randomly(name, weight)
        for theirs, rows in model.checkpoint_tensors(name, weight, config).items():
            is_transposed = config.transposed and rows.dim() == 2 and name.startswith("layers.")
            yield theirs, rows.T if is_transposed else rows


# --------------------------------------------------------------------------------------------------
# The runner
# --------------------------------------------------------------------------------------------------

class ParallelRunner(Runner):
    """What the runners of all ranks have in common. It is put before Runner or GraphRunner (`rank_class`)."""

    def __init__(self, config: model.ModelConfig, *args: Any, peers: Peers, **options: Any):
        self.whole, self.peers = config, peers
        super().__init__(split_config(config, peers.size), *args, **options)

    def _make_rows(self) -> None:
        super()._make_rows()
        rows, width = max(self.max_num_batched_tokens, FEWEST_ROWS), padded_part(self.whole.vocab_size, self.peers.size)
        self.sums = [self.peers.share(rows * self.config.hidden_size, self.dtype) for _ in range(2)]
        self.logits_buffer = self.peers.share(LOGITS_ROWS * width, self.dtype)
        self.tokens = self.peers.share(self.max_num_seqs + 1, torch.int32)
        self.last_tokens = self.tokens.own(self.max_num_seqs + 1).zero_()

    def _build_model(self, tensors: Iterable | model.Transformer | None) -> model.Transformer:
        config = replace(self.config, vocab_size=padded_part(self.whole.vocab_size, self.peers.size))
        make = partial(ParallelTransformer, whole=self.whole, sums=self.sums, logits_buffer=self.logits_buffer)
        tensors = random_tensors(self.whole, self.dtype, self.device) if tensors is None else tensors
        return model.build_model(config, tensors, self.dtype, self.device, self.max_model_len, make)

    def _choose_num_blocks(self, gpu_memory_utilization: float) -> int:
        return int(self.peers.agree([super()._choose_num_blocks(gpu_memory_utilization)], largest=False)[0])

    def _choose_scales(self) -> list[tuple[float, float]]:
        scales = [scale for pair in super()._choose_scales() for scale in pair]
        scales = self.peers.agree(scales, largest=True)
        return list(zip(scales[::2], scales[1::2]))

    @on_its_device
    def allocate_pool(self, num_blocks: int | None, gpu_memory_utilization: float) -> int:
        try:
            return super().allocate_pool(num_blocks, gpu_memory_utilization)
        except Exception:
            self.peers.catch_up()
            raise

    def allocate_host_pool(self, swap_space: float) -> int:
        return super().allocate_host_pool(swap_space / self.peers.size)

    def _model_batch(self, sent: Any, logits_indices: Tensor | None, *args: Any) -> model.Batch:
        num_logits = len(sent.input_ids if logits_indices is None else logits_indices)
        self.peers.barriers_left = self.model.num_barriers(num_logits)
        tokens = self.tokens.all(self.max_num_seqs + 1)[0]
        if self.peers.rank:
            self.last_tokens = tokens
        return super()._model_batch(sent, logits_indices, *args)


class Driver(ParallelRunner):
    """The runner of rank 0. workers: the processes of the other ranks."""

    def __init__(self, *args: Any, workers: "Workers", **options: Any):
        self.workers = workers
        with workers.named():
            super().__init__(*args, **options)

    def allocate_pool(self, num_blocks: int | None, gpu_memory_utilization: float) -> int:
        with self.workers.named():
            return super().allocate_pool(num_blocks, gpu_memory_utilization)

    def allocate_host_pool(self, swap_space: float) -> int:
        with self.workers.named():
            num_blocks = super().allocate_host_pool(swap_space)
            self.workers.wait_until_ready()
        return num_blocks

    def launch(self, step: engine.SchedulerOutput) -> Any:
        with self.workers.named():
            return super().launch(step)

    def _move_blocks(self, step: engine.SchedulerOutput) -> None:
        self.moves = [[number for pair in moves for number in pair]
                      for moves in (step.swaps_out, step.copies, step.swaps_in)]
        super()._move_blocks(step)

    def _send_rows(self, seqs: list[engine.Sequence]) -> tuple[list[int], list[int]]:
        self.entries = super()._send_rows(seqs)
        return self.entries

    def _compute(self, batch: engine.StepInput, sampling_indices: list[int], more_rows: list[int],
                 needs: SamplingNeeds) -> tuple[Callable[[], Tensor], Tensor]:
        self.workers.send([*self.moves, *self.entries, [bool(needs.grammars)], sampling_indices, more_rows,
                           batch.num_tokens, *batch.lists])
        try:
            computed = super()._compute(batch, sampling_indices, more_rows, needs)
        except Exception:
            self.peers.catch_up()
            self.workers.wait()
            raise
        self.workers.wait()
        return computed

    def _wait(self, event: torch.cuda.Event) -> None:  # type: ignore[override]
        with self.workers.waiting():
            while not event.query():
                self.workers.check()
                time.sleep(POLL_SECONDS)
        self.workers.check()


class Follower(ParallelRunner):
    """The runner of a worker."""

    @on_its_device
    @torch.inference_mode()
    def follow(self, lists: list[list[int]]) -> None:
        """Launch a step that rank 0 has launched: what `Driver._compute` sends."""
        *moves, cells, blocks, has_grammars, sampling_indices, more_rows = lists[:8]
        self._move_blocks(engine.SchedulerOutput(
            **{name: list(zip(pairs[::2], pairs[1::2])) for name, pairs in zip(("swaps_out", "copies", "swaps_in"), moves)}))
        if cells:
            sent_cells, sent_blocks = self._send([cells, blocks])
            self.block_tables.view(-1)[sent_cells] = sent_blocks
        nobody: list[Any] = [None] * len(lists[8])
        needs = SamplingNeeds(grammars=[(0, None)] if has_grammars[0] else [])
        try:
            self._compute(engine.StepInput(nobody, *lists[8:]), sampling_indices, more_rows, needs)
        except Exception:
            self.peers.catch_up()
            raise

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplingNeeds) -> Tensor:
        return rows.new_zeros(len(rows))  # rank 0 samples
