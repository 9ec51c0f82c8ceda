"""A model with its weights, in the memory of a device.

A checkpoint's tensors become the decoder's parameters in three moves. Each saves the decoder a branch:

    the checkpoint has                                     families              here it becomes
    `unmerge`
      one matrix of q, k and v, or of gate and up          GPT-2, Phi-3          its parts
      one tensor of all experts' matrices                  Granite's mixtures    one matrix for each expert
                                                           (of transformers 5 all mixtures)
    `load_weights`
      names of its own                                     all                   the decoder's (config.names)
      q_proj, k_proj, v_proj; gate_proj, up_proj           all                   rows of qkv_proj; of gate_up_proj
      matrices as [in, out]                                GPT-2                 [out, in]
      the head, but no embedding that is the same matrix   some with tied ones   the embedding
      masks and other buffers                              GPT-2                 nothing
    `fold`
      a norm's weight minus 1                              Gemma 3               the weight
      a divisor of the logits, in config.json              Granite               a divisor of the last norm's weight
      heads of which only the first numbers rotate         Phi-4-mini            heads with rows in another order
      heads whose neighbours rotate together               ERNIE 4.5             the same
      rows in another order (config.orders)                Qwen3.5, Qwen3-Next   rows in ours

**Partial rope** (Phi-4-mini): the first numbers of a head rotate, and a pair is number i of their first half and number
i of their second half. The kernels pair the halves of the whole head. Here the rows of q and k change places, which
leaves all products of q and k as they are:

    head_dim 8, of which 6 rotate    stored    a0 a1 a2 b0 b1 b2 c0 d0      pairs (a0, b0) (a1, b1) (a2, b2)
                                     here      a0 a1 a2 c0 b0 b1 b2 d0      the same, and (c0, d0) with the angle 0

**Interleaved rope** (ERNIE 4.5): a pair is two neighbours, a0 b0 a1 b1 a2 b2. Here they are a0 a1 a2 b0 b1 b2.
"""
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanopaged import model
from nanopaged.options import feature
from nanopaged.rope import make_rope_table, rotary_dim

# Small parameters that stay in float32: of weights in 8 and 4 bits, recurrent layers (delta.py, mamba.py), and routers
FLOAT32 = ".scale", ".row_scale", ".A_log", ".dt_bias", ".gated_norm", ".expert_bias"


def build_model(config: model.ModelConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype,
                device: torch.device | str, num_positions: int, modules: model.Modules = model.PLAIN,
                *part: Callable[[str, Tensor], Tensor], utilization: float = 1.0) -> model.Transformer:
    """A Transformer with a checkpoint's tensors, for texts of num_positions tokens. Each is copied by itself, so memory
    holds the weights once. utilization: the share of a card's memory that the engine may have. ValueError: too little
    memory, or what `load_weights` raises."""
    with torch.device("meta"):  # shapes without memory
        built = model.Transformer(config, modules_for(config, modules))
    types = {parameter: parameter.dtype if parameter.dtype is not torch.float32 else
             torch.float32 if name.endswith(FLOAT32) else dtype
             for name, parameter in built.named_parameters()}
    is_cuda, on_host = torch.device(device).type == "cuda", {}
    if config.gemma4 and is_cuda:
        on_host = feature("gemma4", "Gemma 4").tables_on_host(types, built, device, utilization)
    size = sum(parameter.numel() * kind.itemsize for parameter, kind in types.items() if parameter not in on_host)
    free = f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free, less" if is_cuda else "less free memory"
    head_dims = [rope.get("head_dim", config.head_dim) for rope in config.ropes]
    table_size = num_positions * sum(head_dims) * 4
    with memory_for(f"rope's angles of {num_positions} positions take {table_size / 2**30:.1f} GiB, and more while "
                    "they are computed, which the host does not have; lower max_model_len", table_size):
        built.rope_tables = [make_rope_table(rope, head_dim, num_positions).to(device)
                             for rope, head_dim in zip(config.ropes, head_dims)]
    with memory_for(f"the weights take {size / 2**30:.1f} GiB, and {device} has {free} than loading them takes; use a "
                    "smaller model or dtype", 0 if is_cuda else size):
        # Module.to_empty does the same, but imports sympy for it: a quarter of a second
        built._apply(lambda parameter: on_host[parameter] if parameter in on_host else torch.empty(
            parameter.shape, dtype=types[parameter], device=device))
        load_weights(built, unmerge(tensors, config), *part)
        for name, parameter in built.named_parameters():
            parameter.data = fold(name, parameter.data, config)
    return built.eval().requires_grad_(False)


def modules_for(config: model.ModelConfig, modules: model.Modules = model.PLAIN) -> model.Modules:
    """The modules; for a mixture of experts with its MLPs, for gpt-oss, Ministral 3 and layers of several kinds with
    these."""
    if config.output_gate:
        modules = feature("qwen3_5", "attention with an output gate").with_output_gate(modules)
    if config.sinks:
        modules = feature("gpt_oss", "a model with sinks").with_sinks(modules)
    if config.experts:
        modules = feature("experts", "a mixture of experts").with_experts(modules)
    if config.gemma4:
        modules = feature("gemma4", "Gemma 4").with_layers(modules, config)
    if config.ropes and config.ropes[0].get("llama_4_scaling_beta"):
        modules = feature("query_scale", "llama_4_scaling_beta in config.json").with_query_scale(modules)
    if config.groups:
        modules = feature("kinds.device", "a model with layers of several kinds").with_groups(modules)
    if config.states:
        modules = feature("kinds.recurrent", "a model with recurrent states").with_state_layers(modules, config)
    return modules


def unmerge(tensors: Iterable[tuple[str, Tensor]], config: model.ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors with their names, and the parts of config.merged in place of a merged one. A merged tensor of three
    dimensions has the matrices of all experts, [experts, out, in] or [experts, in, out]. Such a part's name has {} in
    place of the expert's number."""
    for name, tensor in tensors:
        path = re.sub(r"\.(weight|bias|scale|zero|row_scale)$", "", name)
        kind, size = name[len(path):] or ".weight", tensor.shape[-2:]
        module = next((module for module in config.merged if f".{path}".endswith(f".{module}")), "")
        rows = config.merged.get(module, {})
        total, is_whole = sum(rows.values()), tensor.dim() == 3
        if is_whole and size[0] != total == size[1]:
            tensor, size = tensor.transpose(1, 2), size[::-1]
        dim = int(config.transposed and tensor.dim() == 2)
        if not rows or size[dim:dim + 1] != (total,):
            yield name, tensor
            continue
        for i, matrix in enumerate(tensor if is_whole else [tensor]):
            for part, one in zip(rows, matrix.split([*rows.values()], dim)):
                yield path.removesuffix(module) + part.format(i) + kind, one


PREFIXES = r"((model|language_model|transformer|decoder)\.)*"  # of a checkpoint's names, before the decoder's own


@torch.no_grad()
def load_weights(transformer: model.Transformer, tensors: Iterable[tuple[str, Tensor]],
                 part: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> None:
    """Copy a checkpoint's (name, tensor) pairs into the model, one at a time. part: what this model needs of a tensor;
    all of it, unless several GPUs share the model. ValueError: a tensor is missing, or has another shape than
    config.json implies."""
    config = transformer.config
    targets = {theirs: target for name, parameter in transformer.named_parameters()
               for theirs, target in checkpoint_tensors(name, parameter, config).items()}
    missing = set(targets)
    embed = config.names.get("embed_tokens", "embed_tokens") + ".weight"
    for name, tensor in tensors:
        bare = re.sub(f"^{PREFIXES}", "", name)
        if bare == "lm_head.weight" and config.tie_word_embeddings and embed in missing:
            bare = embed  # one matrix, which safetensors' save_model stores as the head only
        if bare not in targets:  # a buffer such as GPT-2's causal mask, or that matrix once more
            continue
        missing.discard(bare)
        target = targets[bare]
        if config.transposed and tensor.dim() == 2 and bare.startswith(config.names["layers"] + "."):
            tensor = tensor.T
        if not tensor.is_floating_point() and tensor.dtype is not target.dtype:
            raise ValueError(f"tensor {name} has the type {tensor.dtype}; weights must be floating-point numbers")
        tensor = part(bare, tensor)
        if tensor.shape != target.shape:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(target.shape)}")
        target.copy_(tensor)
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} tensor(s) that config.json implies, "
                         f"the first being {min(missing)!r}")


def checkpoint_tensors(name: str, parameter: Tensor, config: model.ModelConfig) -> dict[str, Tensor]:
    """The checkpoint's tensors that make up our parameter `name`: {tensor name: the rows that it fills}."""
    if name in config.names:  # of a whole parameter
        return {config.names[name]: parameter}
    *path, module, kind = name.split(".")
    rows = {module: parameter}
    if parts := config.parts.get(module):
        rows = {part: one for part, one in zip(parts, parameter.split([*parts.values()])) if part}  # "": no meaning
    elif module == "qkv_proj":
        num_kv_heads, head_dim = config.layer_heads[int(path[-1])] if config.layer_heads else (
            config.num_kv_heads, config.head_dim)
        q, kv = config.num_heads * head_dim, num_kv_heads * head_dim
        sizes = [q, kv, kv][:1 + (len(parameter) - q) // kv]  # some of Gemma 4's layers have no v_proj
        rows = dict(zip(("q_proj", "k_proj", "v_proj"), parameter.split(sizes)))
    elif module == "gate_up_proj" and config.gated_mlp:
        rows = dict(zip(("gate_proj", "up_proj"), parameter.chunk(2)))
    return {".".join(filter(None, (config.names.get(word, word) for word in (*path, part, kind)))): target
            for part, target in rows.items()}


@torch.no_grad()
def fold(name: str, weight: Tensor, config: model.ModelConfig, back: bool = False) -> Tensor:
    """The decoder's parameter `name`, made of the checkpoint's; back: the checkpoint's, made of the decoder's."""
    if name.endswith("norm.weight"):
        weight = weight.float() if config.float32_norms else weight
        scale = config.logits_scaling if name == "norm.weight" else 1.0
        if name.endswith("router_norm.weight"):  # Gemma 4 multiplies by this beside the weight
            scale = config.hidden_size ** 0.5
        if (scale, config.norm_offset) != (1, 0):
            weight = weight * scale - config.norm_offset if back else (weight + config.norm_offset) / scale
    orders = [torch.tensor(order) for module, order in config.orders.items() if f".{module}." in name]
    size = rotary_dim(config.ropes[0], config.head_dim) if config.ropes else config.head_dim
    is_interleaved = config.ropes and config.ropes[0].get("is_interleaved", False)
    is_norm = config.qk_norm and name.endswith(("q_norm.weight", "k_norm.weight"))  # of a head
    if (size < config.head_dim or is_interleaved) and ("qkv_proj" in name or is_norm):
        half, pairs = config.head_dim // 2, size // 2
        firsts, seconds = range(pairs), range(pairs, size)  # of the pairs
        if is_interleaved:
            firsts, seconds = range(0, size, 2), range(1, size, 2)
        order = torch.tensor([*firsts, *range(size, half + pairs), *seconds, *range(half + pairs, config.head_dim)])
        heads = torch.arange(len(weight)).view(-1, config.head_dim)
        q_and_k = heads[:config.num_heads + config.num_kv_heads]  # a norm's weight has one head
        q_and_k.copy_(q_and_k[:, order])
        orders.append(heads.flatten())
    for order in reversed(orders) if back else orders:
        rows = weight.view(torch.uint8 if weight.itemsize == 1 else weight.dtype)
        order = (order.argsort() if back else order).to(weight.device)
        weight = rows.index_select(0, order).view(weight.dtype)
    return weight


def random_tensors(config: model.ModelConfig, dtype: torch.dtype, device: torch.device,
                   seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights, as a checkpoint's tensors. They are the same on any number of GPUs."""
    with torch.device("meta"):
        whole = model.Transformer(config, modules_for(config))
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in whole.named_parameters():
        weight = torch.ones(parameter.shape, dtype=dtype, device=device)
        if "norm.weight" not in name and not name.endswith("layer_scalar"):
            weight.normal_(std=0.02, generator=generator)
        yield from as_checkpoint([(name, weight)], config)


def as_checkpoint(parameters: Iterable[tuple[str, Tensor]], config: model.ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """A Transformer's parameters as a checkpoint's tensors."""
    for name, parameter in parameters:
        for theirs, rows in checkpoint_tensors(name, fold(name, parameter, config, back=True), config).items():
            is_transposed = config.transposed and rows.dim() == 2 and name.startswith("layers.")
            yield theirs, rows.T if is_transposed else rows


@contextmanager
def memory_for(sentence: str, size: float = 0) -> Iterator[None]:
    """Raises ValueError with this sentence if the host has less than `size` bytes, or if memory runs out inside."""
    try:
        if size > host_memory():
            raise MemoryError
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError; on a CPU it is a plain one
        if isinstance(error, RuntimeError) and not re.search("(out of|allocate|enough) memory", str(error)):
            raise
        raise ValueError(sentence) from None


def host_memory() -> float:
    """Bytes. Linux gives out more memory than it has, and ends the process that writes to it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
