"""Chapter 2: the model. One decoder for GPT-2, OPT, Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3.

These families are one architecture with a few switches. Every layer is

    x = x + out(attention(norm(x)))         attention: q, k, v = qkv(x), [q and k norm], [rope], cache, attend
    x = x + down(activation(up(norm(x))))   gated (SwiGLU) or plain

and `ModelConfig` says how the switches stand: LayerNorm or RMSNorm, learned positions or rope, biases or
none, an MLP with a gate or without, how many query heads share a kv head. Nothing below asks for a family
by name; only the functions at the end do, which turn a checkpoint's configuration and tensor names into ours.

The model sees a **flat batch**: the new tokens of all sequences of a step in one dimension, `[num_tokens]`,
whether they are a whole prompt, a piece of one, or one decoded token. All layers but attention treat every
token alike; attention finds out who belongs to whom from the `Batch`. Its past is in the paged cache and
nowhere else: each layer writes the new K and V into their slots first, then attends over the blocks.

Shapes: T = num_tokens, D = hidden_size, H = num_heads, KV = num_kv_heads.
"""
import math
import re
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel import Kernels, cdiv, rms_norm


@dataclass
class Batch:
    """What a forward pass needs to know of a step. Sequences with one new token come first."""
    input_ids: Tensor  # [T]
    positions: Tensor  # [T] each token's position in its sequence
    slot_mapping: Tensor  # [T] where its K and V go in the cache, -1: nowhere
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    seq_lens: Tensor  # [num_seqs] int32: tokens in the cache after this step
    query_start_loc: Tensor  # [num_seqs + 1] int32
    logits_indices: Tensor | None  # [num_samples] rows of the T whose logits are wanted; None: all
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # how many sequences have one new token
    query_tiles: Tensor | None = None  # the Triton kernel's work list
    sampled: Tensor | None = None  # sequences: logits_indices begin with the last tokens of these
    plan: dict = field(default_factory=dict)  # what the torch path works out once for all layers

    def last_tokens(self) -> "Batch":
        """The sequences that sample, with one new token each: their last. Padding, of length 0, is still without a query."""
        seq_lens = self.seq_lens.index_select(0, self.sampled)
        count = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        return replace(self, block_tables=self.block_tables.index_select(0, self.sampled), seq_lens=seq_lens,
                       query_start_loc=torch.minimum(count, (seq_lens > 0).sum(dtype=torch.int32)), logits_indices=None,
                       max_query_len=1, num_decodes=len(seq_lens), query_tiles=None, plan={})


@dataclass
class ModelConfig:
    """The switches, in our words. The functions at the end translate a config.json's."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    norm: str = "rms"  # or "layer"
    norm_eps: float = 1e-6
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    learned_positions: bool = False
    position_offset: int = 0  # OPT's position table has two rows that no token uses
    rope: dict = field(default_factory=dict)  # rope_theta, rope_type and that type's numbers
    sliding_windows: list[int] = field(default_factory=list)  # per layer, 0: sees everything
    torch_dtype: torch.dtype = torch.float32
    names: dict[str, str] = field(default_factory=dict)  # our module names -> the checkpoint's
    transposed: bool = False  # GPT-2 stores its matrices [in, out]

    @property
    def window(self) -> int:
        """How many tokens the next one sees, itself included, in the layer that sees most; 0: all."""
        return max(self.sliding_windows) if self.sliding_windows and all(self.sliding_windows) else 0

    @classmethod
    def from_hf(cls, hf: dict) -> "ModelConfig":
        """From a checkpoint's config.json. ValueError: an architecture or a setting that is not supported."""
        if (quantization := hf.get("quantization_config")) is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ValueError(f"the checkpoint is quantised ({method}); use one with float32, float16 or bfloat16 weights")
        architectures = hf.get("architectures") or ["none given"]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if architecture not in list(FAMILIES):
            raise ValueError(f"unknown architecture {architecture!r:.80}; known are {', '.join(FAMILIES)}")
        try:
            config = FAMILIES[architecture](hf)
        except KeyError as missing:
            raise ValueError(f"config.json of a {architecture} must have {missing}, and has not") from None
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(f"config.json has a value that no {architecture} can have: {error}") from None
        config.check()
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"weights of type {dtype} are not supported; float32, float16 and bfloat16 are")
        config.torch_dtype = getattr(torch, dtype)
        if config.num_heads % config.num_kv_heads:
            raise ValueError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} kv heads evenly")
        if config.head_dim % 2:
            raise ValueError(f"head_dim {config.head_dim} is odd, and the kernels work on halves of a head")
        return config

    def check(self) -> None:
        """ValueError unless this can be a model: a config.json may hold anything."""
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                     "max_position_embeddings"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"config.json: {name} must be an integer of at least 1, not {value!r:.80}")
        rope = {key: self.rope[key] for key in ("rope_theta", *ROPE_TYPES[self.rope["rope_type"]])} if self.rope else {}
        for name, value in {"the norm's epsilon": self.norm_eps, **rope}.items():
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"config.json: {name} must be a number above 0, not {value!r:.80}")
        if len(self.sliding_windows) not in (0, self.num_layers) or any(type(w) is not int or w < 0 for w in self.sliding_windows):
            raise ValueError(f"config.json: a sliding window must be a number of tokens, and there must be a kind for each of the "
                             f"{self.num_layers} layers, not windows of {self.sliding_windows!r:.80}")
        if self.activation not in list(ACTIVATIONS):
            raise ValueError(f"unknown activation {self.activation!r:.80}; known are {', '.join(ACTIVATIONS)}")


ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu, "swish": F.silu, "relu": F.relu, "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"), "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


# --------------------------------------------------------------------------------------------------
# The decoder
# --------------------------------------------------------------------------------------------------

class Transformer(nn.Module):
    """The decoder: a flat batch of tokens in, the logits of the rows that sample out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.embed_positions = Embedding(config.max_position_embeddings + config.position_offset, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = Norm(config, config.hidden_size)
        self.head = (self.embed if config.tie_word_embeddings else
                     Linear(config.hidden_size, config.vocab_size, bias=False))

    def forward(self, batch: Batch, kv_cache: list[tuple], kernels: Kernels, out: Tensor | None = None) -> Tensor:
        """Logits [num_samples, vocab_size], in `out` if that is given; `kv_cache` has each layer's (k_cache, v_cache, k_scale,
        v_scale), and is written."""
        x = self.embed(batch.input_ids)  # [T, D]
        if self.config.learned_positions:
            x = x + self.embed_positions(batch.positions + self.config.position_offset)
            rotation = None
        else:
            rotation = self.rope_table.index_select(0, batch.positions)  # [T, head_dim]
        x, residual = torch.zeros_like(x), x  # each norm adds what came before it to the residual stream, the first one nothing
        for layer, cache in zip(self.layers, kv_cache):
            q, residual = layer.store(x, residual, rotation, batch, cache, kernels)
            if layer is not self.layers[-1]:
                x, residual = layer.attend(q, residual, batch, cache, kernels)
        # After the last layer nobody attends to these tokens any more: of those without logits, K and V are all that is wanted.
        # What samples is computed by itself whatever else is: its attention's bits must not go with the batch.
        hidden, rows, cache = [], batch.logits_indices, kv_cache[-1]
        if batch.sampled is not None and batch.max_query_len > 1:
            few, rows = rows.split([len(batch.sampled), len(rows) - len(batch.sampled)])
            if len(few):
                hidden += [self.finish(q.index_select(0, few), residual.index_select(0, few), batch.last_tokens(), cache, kernels)]
        if rows is None or len(rows):
            hidden += [self.finish(q, residual, batch, cache, kernels, rows)]
        if not hidden:  # only chunks of prompts
            return q.new_empty(0, self.config.vocab_size)
        return torch.matmul(hidden[0] if len(hidden) == 1 else torch.cat(hidden), self.head.weight.T, out=out)

    def finish(self, q, residual, batch: Batch, cache: tuple, kernels: Kernels, rows: Tensor | None = None) -> Tensor:
        """What the head takes, of these rows or all: the rest of the last layer, and the norm."""
        x, residual = self.layers[-1].attend(q, residual, batch, cache, kernels)
        if rows is not None:  # x may be in pieces, [pieces, T, D]
            x, residual = x.index_select(-2, rows), residual.index_select(0, rows)
        return self.norm(x, residual)[0]

    def fuse(self) -> None:
        """Compile the small functions between the matrix products, each into one kernel for any number of tokens."""
        # Every shape of one_row_product is a compilation of its own; beyond its limit torch silently stops compiling.
        settings = torch._dynamo.config
        setattr(settings, "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit", 64)
        fused_norm, fused_activate = compile_rows(add_norm, 2), compile_rows(activate, 1)
        fused_product, fused_expand = (torch.compile(f, **COMPILER) for f in (one_row_product, one_row_expand))

        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return fused_product(x, weight, bias) if is_small_row(x, weight) else F.linear(x, weight, bias)

        def product_for_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            pieces = num_pieces(x, weight) if bias is None else 1
            return product(x, weight, bias) if pieces == 1 else product_in_pieces(x, weight, pieces)

        def expand(x: Tensor, up: Linear, activation: str, gated: bool) -> Tensor:
            if is_small_row(x, up.weight):
                return fused_expand(x, up.weight, up.bias, activation, gated)
            return fused_activate(up(x), activation, gated)

        for layer in self.layers:
            layer.qkv.matrix_product = layer.up.matrix_product = product
            layer.out.matrix_product = layer.down.matrix_product = product_for_norm
            layer.expand = expand
        for module in self.modules():
            if isinstance(module, Norm):
                module.add_norm = fused_norm

    def make_rope_table(self, device, num_positions: int) -> None:
        """Computed, not loaded: [num_positions, head_dim] float32, the cosines, then the sines."""
        if not self.config.learned_positions:
            angles = torch.outer(torch.arange(num_positions).float(), rope_frequencies(self.config))
            self.rope_table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


class Layer(nn.Module):
    """One decoder layer, in two parts: after the first a token's K and V are in the cache."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        c = self.config = config
        self.window = c.sliding_windows[index] if c.sliding_windows else 0
        self.attention_norm = Norm(c, c.hidden_size)
        # One product for q, k and v, and one for gate and up: fewer, larger matrices are faster.
        self.qkv = Linear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=c.qkv_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = Norm(c, c.head_dim), Norm(c, c.head_dim)  # their weights: `rotate_and_store` norms, too
        self.out = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.out_bias)
        self.mlp_norm = Norm(c, c.hidden_size)
        self.up = Linear(c.hidden_size, c.intermediate_size * (2 if c.gated_mlp else 1), bias=c.mlp_bias)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.expand = expand

    def store(self, x, residual, rotation, batch: Batch, cache: tuple, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """(queries [T, H, head_dim], residual) from x, the output of the layer before, [T, D] or [pieces, T, D] (see
        `product_in_pieces`), and residual [T, D], what it is still to be added to. K and V go into the cache."""
        c, (k_cache, v_cache, k_scale, v_scale) = self.config, cache
        x, residual = self.attention_norm(x, residual)
        qkv = self.qkv(x).view(len(x), -1, c.head_dim)  # [T, H + 2 KV, head_dim]
        norms = (self.q_norm.weight, self.k_norm.weight) if c.qk_norm else (None, None)
        q = kernels.rotate_and_store(qkv, c.num_heads, rotation, *norms, c.norm_eps, k_cache, v_cache, batch.slot_mapping,
                                     k_scale, v_scale)
        return q, residual

    def attend(self, q, residual, batch: Batch, cache: tuple, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """The rest: attention of these queries over the cache, and the MLP; (x, residual) for the next layer."""
        c, (k_cache, v_cache, k_scale, v_scale) = self.config, cache
        o = kernels.attention(q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.query_start_loc,
                              c.head_dim ** -0.5, max_query_len=batch.max_query_len, max_seq_len=batch.max_seq_len,
                              sliding_window=self.window, num_decodes=batch.num_decodes, query_tiles=batch.query_tiles,
                              plan=batch.plan, k_scale=k_scale, v_scale=v_scale)
        x, residual = self.mlp_norm(self.out(o.flatten(1)), residual)
        return self.down(self.expand(x, self.up, c.activation, c.gated_mlp)), residual


class Embedding(nn.Module):
    """A table of vectors. Like the other modules here it starts without values: `build_model` fills them in."""

    def __init__(self, rows: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Linear(nn.Module):
    """A matrix product: [T, in] -> [T, out]. `fuse` has another function for one row, and one that returns pieces, [pieces, T,
    out], for products that a norm follows."""
    matrix_product = staticmethod(F.linear)

    def __init__(self, size_in: int, size_out: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.empty(size_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix_product(x, self.weight, self.bias)


class Norm(nn.Module):
    """Adds a sublayer's output to the residual stream and norms the sum: (x, residual) -> (norm(sum), sum)."""

    def __init__(self, config: ModelConfig, size: int):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if config.norm == "layer" else None
        self.add_norm = add_norm

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.add_norm(x, residual, self.weight, self.bias, self.eps)


# The functions between the matrix products only move memory: on a GPU each is worth a kernel of its own, see `fuse`.

def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm, or layer norm where there is a bias, of x + residual; and the sum itself. x may come in pieces."""
    for piece in (x if x.dim() == 3 else [x]):  # one by one: this fuses with the norm, and .sum(0) would not
        residual = piece + residual
    if bias is None:
        return rms_norm(residual, weight, eps), residual
    return F.layer_norm(residual, residual.shape[-1:], weight, bias, eps), residual


def one_row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for x [1, in]. Such a product is nothing but reading the weights once, and a plain sum does that faster
    than a matrix kernel made for more rows. It goes over `in` in pieces of at most 1,024, which are added up first: a sum
    over more would become a loop that waits for each of its loads."""
    size = weight.shape[1]
    count = next(n for n in range(cdiv(size, 1024), size + 1) if size % n == 0)
    x, pieces = x.float().view(count, -1), weight.view(len(weight), count, -1)
    row = sum([pieces[:, i].float() * x[i] for i in range(count)]).sum(-1)
    return (row if bias is None else row + bias.float()).to(weight.dtype)[None]


def one_row_expand(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
    """`expand` for one row: the products of gate and up, side by side, and what becomes of them in one kernel."""
    count = 2 if gated else 1
    biases = [None] * count if bias is None else bias.chunk(count)
    rows = [one_row_product(x, *part) for part in zip(weight.chunk(count), biases)]
    return ACTIVATIONS[activation](rows[0]) * rows[1] if gated else ACTIVATIONS[activation](rows[0])


def is_small_row(x: Tensor, weight: Tensor) -> bool:
    """One row, times a matrix that is not so large that the library, too, reads it at full rate."""
    return len(x) == 1 and weight.numel() <= 2**26


def num_pieces(x: Tensor, weight: Tensor) -> int:
    """Into how many pieces `product_in_pieces` should cut a product, by an H200's times; 1: not at all."""
    pieces = 4 if len(weight) <= 2048 else 2
    fits = weight.shape[1] % (64 * pieces) == 0 and weight.dtype is not torch.float16  # where a piece may overflow
    return pieces if fits and len(x) <= 256 and len(weight) <= 8192 and not is_small_row(x, weight) else 1


def product_in_pieces(x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """x [T, in] times weight [out, in] as products of pieces of the inner dimension: [pieces, T, out], whose sum it is.

    A product of few rows and columns has too few tiles for all multiprocessors. The library then cuts the inner dimension,
    too, and needs a kernel more to add up the pieces. Here the norm that follows does that, on its way: about 2 microseconds
    less for each such product on an H200. (In bfloat16 each piece is rounded, where else the whole would be.)
    """
    x, weight = x.view(len(x), pieces, -1), weight.view(len(weight), pieces, -1)
    return torch.bmm(x.transpose(0, 1), weight.permute(1, 2, 0))


def expand(x: Tensor, up: Linear, activation: str, gated: bool) -> Tensor:
    """The first half of an MLP: x [T, D] -> [T, intermediate]."""
    return activate(up(x), activation, gated)


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """An MLP's nonlinearity: x [T, intermediate], or [T, 2 * intermediate] where the first half gates the second."""
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


# For torch.compile. Sizes and numbers such as eps are constants of the second model in a process, too, where torch would make
# variables of all in which it differs from the first. And kernels are compiled here: the processes that torch would start for
# that are ready when nearly all is done.
COMPILER = dict(dynamic=False, options={"compile_threads": 1})


def compile_rows(function: Callable, num_tensors: int) -> Callable:
    """torch.compile for any number of rows: the last dimension but one (or the only one) of the first num_tensors arguments
    may change. All other sizes become constants of the generated kernel, which moves memory about twice as fast as one that
    reads them."""
    compiled = torch.compile(function, **COMPILER)

    def call(*arguments):
        for tensor in arguments[:num_tensors]:
            torch._dynamo.maybe_mark_dynamic(tensor, max(0, tensor.dim() - 2))
        return compiled(*arguments)

    return call


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair, [head_dim // 2] float32, stretched for contexts longer than trained."""
    rope = config.rope
    frequency = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if rope["rope_type"] == "linear":  # every position counts for less
        frequency = frequency / rope["factor"]
    elif rope["rope_type"] == "llama3":  # slow rotations are stretched, fast ones kept, those between blended
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # within the trained context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / rope["factor"])
    return frequency


# --------------------------------------------------------------------------------------------------
# Weights
# --------------------------------------------------------------------------------------------------

def build_model(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]] | None, dtype: torch.dtype, device,
                num_positions: int) -> Transformer:
    """A Transformer on `device` with a checkpoint's (name, tensor) pairs, or random weights if `tensors` is None.

    One tensor at a time is copied to its place, so memory stays near one copy of the weights. ValueError: there is no
    memory for them, or they are not what `config` says.
    """
    with torch.device("meta"):
        model = Transformer(config)
    is_cuda = torch.device(device).type == "cuda"
    free = f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB free" if is_cuda else "not so much memory"
    try:  # as model.to_empty does, which would import sympy for it: a quarter of a second
        model._apply(lambda parameter: torch.empty(parameter.shape, dtype=dtype, device=device))
    except RuntimeError:  # torch.OutOfMemoryError is one
        size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        raise ValueError(f"the weights take {size / 2**30:.1f} GiB, and {device} has {free}; use a smaller model or dtype") from None
    if tensors is None:
        for name, parameter in model.named_parameters():
            nn.init.ones_(parameter) if "norm.weight" in name else nn.init.normal_(parameter, std=0.02)
    else:
        load_weights(model, tensors)
    model.make_rope_table(device, num_positions)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def load_weights(model: Transformer, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a checkpoint into the model. ValueError: a tensor is missing or has another shape than config.json says."""
    config = model.config
    targets = {theirs: target for name, parameter in model.named_parameters()
               for theirs, target in checkpoint_tensors(name, parameter, config).items()}
    missing = set(targets)
    embed, head = (f"{config.names[module]}.weight" for module in ("embed", "head"))
    if config.tie_word_embeddings:  # one matrix: safetensors' save_model stores it under one of its names, often the head's
        targets[head] = targets[embed]
    for name, tensor in tensors:
        bare = re.sub(r"^((model|transformer|decoder)\.)+", "", name)
        if bare not in targets:  # a buffer such as GPT-2's causal mask
            continue
        if bare == head and config.tie_word_embeddings:
            if embed not in missing:  # stored under both names: the embedding's counts
                continue
            bare = embed
        missing.discard(bare)
        target = targets[bare]
        if config.transposed and tensor.dim() == 2 and bare.startswith(config.names["layers"] + "."):
            tensor = tensor.T
        if tensor.shape != target.shape:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; config.json implies {list(target.shape)}")
        target.copy_(tensor)
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} tensor(s) that config.json implies, "
                         f"the first being {min(missing)!r}")


def checkpoint_tensors(name: str, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """The checkpoint's tensors that make up our parameter `name`: their names, and the rows of ours each one fills."""
    *path, module, kind = name.split(".")
    q, kv, mlp = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    parts = {module: parameter}
    if module == "qkv" and "qkv" not in config.names:  # GPT-2 stores them merged, as we do
        parts = dict(zip("qkv", parameter.split([q, kv, kv])))
    elif module == "up" and config.gated_mlp:
        parts = dict(zip(["gate", "up"], parameter.split([mlp, mlp])))
    return {".".join(config.names.get(word, word) for word in (*path, part, kind)): rows for part, rows in parts.items()}


# --------------------------------------------------------------------------------------------------
# Families: what a config.json and its tensor names mean
# --------------------------------------------------------------------------------------------------

def gpt2(hf: dict) -> ModelConfig:
    for key, supported in dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False).items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"GPT-2 with {key}={hf[key]} is not supported")
    return ModelConfig(
        hf["vocab_size"], hf["n_embd"], hf["n_layer"], hf["n_head"], hf["n_head"], hf["n_embd"] // hf["n_head"],
        hf.get("n_inner") or 4 * hf["n_embd"], hf["n_positions"], norm="layer",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5), activation=hf.get("activation_function", "gelu_new"),
        gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True, learned_positions=True, transposed=True,
        tie_word_embeddings=hf.get("tie_word_embeddings", True),
        names={"embed": "wte", "embed_positions": "wpe", "layers": "h", "attention_norm": "ln_1", "qkv": "attn.c_attn",
               "out": "attn.c_proj", "mlp_norm": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj", "norm": "ln_f",
               "head": "lm_head"})


def opt(hf: dict) -> ModelConfig:
    for key, supported in dict(do_layer_norm_before=True, _remove_final_layer_norm=False, enable_bias=True,
                               layer_norm_elementwise_affine=True, word_embed_proj_dim=hf["hidden_size"]).items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"OPT with {key}={hf[key]} is not supported (facebook/opt-350m is the one that has it)")
    heads = hf["num_attention_heads"]
    return ModelConfig(
        hf["vocab_size"], hf["hidden_size"], hf["num_hidden_layers"], heads, heads, hf["hidden_size"] // heads,
        hf["ffn_dim"], hf["max_position_embeddings"], norm="layer", norm_eps=1e-5,
        activation=hf.get("activation_function", "relu"), gated_mlp=False, qkv_bias=True, out_bias=True, mlp_bias=True,
        learned_positions=True, position_offset=2, tie_word_embeddings=hf.get("tie_word_embeddings", True),
        names={"embed": "embed_tokens", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
               "out": "self_attn.out_proj", "attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
               "up": "fc1", "down": "fc2", "norm": "final_layer_norm", "head": "lm_head"})


def llama(hf: dict, **switches) -> ModelConfig:
    heads = hf["num_attention_heads"]
    attention_bias = hf.get("attention_bias", False)
    settings = dict(qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=hf.get("mlp_bias", False)) | switches
    return ModelConfig(
        hf["vocab_size"], hf["hidden_size"], hf["num_hidden_layers"], heads, hf.get("num_key_value_heads") or heads,
        hf.get("head_dim") or hf["hidden_size"] // heads, hf["intermediate_size"], hf["max_position_embeddings"],
        norm_eps=hf.get("rms_norm_eps", 1e-6), activation=hf.get("hidden_act", "silu"), rope=rope_settings(hf),
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        names={"embed": "embed_tokens", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
               "out": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
               "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj",
               "up": "mlp.up_proj", "down": "mlp.down_proj", "head": "lm_head"},
        **settings)


def mistral(hf: dict) -> ModelConfig:
    window = hf.get("sliding_window", 4096) or 0  # absent means 4096, null means none
    return llama(hf, qkv_bias=False, out_bias=False, mlp_bias=False, sliding_windows=[window] * hf["num_hidden_layers"])


def qwen_windows(hf: dict) -> list[int]:
    """Qwen's layers from max_window_layers on see a window, if use_sliding_window says so."""
    window = hf.get("sliding_window") or 0 if hf.get("use_sliding_window", False) else 0
    kinds = hf.get("layer_types") or ["sliding_attention" if i >= hf.get("max_window_layers", 28) else "full_attention"
                                      for i in range(hf["num_hidden_layers"])]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def qwen2(hf: dict) -> ModelConfig:
    return llama(hf, qkv_bias=True, out_bias=False, mlp_bias=False, sliding_windows=qwen_windows(hf))


def qwen3(hf: dict) -> ModelConfig:
    return llama({"head_dim": 128} | hf, mlp_bias=False, qk_norm=True, sliding_windows=qwen_windows(hf))


FAMILIES: dict[str, Callable[[dict], ModelConfig]] = {
    "GPT2LMHeadModel": gpt2, "OPTForCausalLM": opt, "LlamaForCausalLM": llama, "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2, "Qwen3ForCausalLM": qwen3,
}

ROPE_TYPES = {"default": (), "linear": ("factor",),
              "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def rope_settings(hf: dict) -> dict:
    """Both spellings: rope_theta beside rope_scaling, and the newer rope_parameters that holds everything."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    absent = [key for key in ROPE_TYPES[kind] if key not in given]
    if absent:
        raise ValueError(f"rope type {kind!r} needs {', '.join(absent)} in config.json")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={given['partial_rotary_factor']} is not supported")
    return {"rope_theta": 10000.0} | {k: hf[k] for k in ["rope_theta"] if k in hf} | given | {"rope_type": kind}
