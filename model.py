"""Chapter 2: the model. One decoder for GPT-2, OPT, Llama, SmolLM, Mistral, Qwen, Phi, Granite, OLMo and Gemma 3.

A decoder reads tokens and computes logits for the next one: a number for each entry of the vocabulary. These families
share one architecture. Each token is a vector x of hidden_size numbers, and every layer adds to it twice:

    x = x + o_proj(attention(norm(x)))                     q, k, v = qkv_proj(norm(x)), [q and k norm], [rope]
    x = x + down_proj(activation(gate_up_proj(norm(x))))   the MLP, gated (SwiGLU) or plain

The running x is the **residual stream**. `ModelConfig` holds the switches: LayerNorm or RMSNorm, learned positions or
rope (`rotate` in kernel.py), biases or none, an MLP with or without a gate, the number of query heads that share a kv
head. The decoder never asks for a family by name; `nanopaged/weights/families.py` translates each family's config.json
and tensor names, and `build.py` there loads the tensors. Each layer writes the new tokens' K and V into the cache
before its attention reads it.

**Prefill and decode.** Prefill computes the tokens of a prompt together. Decode computes one token of each sequence
per step: the last sampled one, whose K and V are not in the cache yet. Decode fills one slot in every layer:

    step      tokens in            positions   in KV cache before   K, V written of   sampled
    prefill   The cat sat on the   0 1 2 3 4   0                    0 1 2 3 4         mat
    decode    mat                  5           5                    5                 .
    decode    .                    6           6                    6                 Then

Both are the same computation, but their cost differs. A step of T tokens reads each weight once, 2 bytes in bfloat16,
and computes 2T FLOPs with it: T FLOPs per byte. An H200 computes 180 to 190 FLOPs in the time that it reads a byte
(measured). Compute therefore bounds a step of more tokens than that, as with long prompts, and memory bounds a smaller
one, above all decode, which also reads a sequence's whole K and V for one token. A batch reads the weights once for all
its sequences, which is why an engine batches.

Shapes: T = number of tokens, R = number of logit rows, D = hidden_size, H = num_heads, KV = num_kv_heads.
"""
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged import kernel

# One layer's K and V, [num_blocks, block_size, KV, head_dim] each, and the factors by which an fp8 cache divides them.
LayerCache = tuple[Tensor, Tensor, float, float]
Kernels = kernel.Kernels


@dataclass
class Batch:
    """The inputs of a step, a **flat batch**: the new tokens of all sequences in one dimension. A and C decode, and B
    brings a prompt of 4 tokens (nanopaged/device/step_input.py draws blocks and slots):

        sequence           A   C   B
        input_ids          a6  c4  b0  b1  b2  b3
        positions          6   4   0   1   2   3
        query_start_loc    0   1   2               6
        seq_lens           7   5   4

    In a layer, only attention knows of sequences. It takes the queries of sequence i from query_start_loc[i] up to
    query_start_loc[i + 1], and its keys through block_tables[i].
    """
    input_ids: Tensor  # [T]
    positions: Tensor  # [T] each token's position in its sequence
    slot_mapping: Tensor  # [T] the slot of each token's K and V; -1: do not write (the cache has them; or padding)
    block_tables: Tensor  # [num_seqs, max_blocks] int32: logical block -> block id, the same id in every layer
    seq_lens: Tensor  # [num_seqs] int32: tokens in the cache after this step
    query_start_loc: Tensor  # [num_seqs + 1] int32
    logits_indices: Tensor | None  # tokens whose logits are read, first the last one of each sequence that samples;
    # None: all tokens
    sampling_places: Tensor | None  # the sequences that sample, indices into seq_lens; None: not known
    metadata: "AttentionMetadata"


class AttentionMetadata(NamedTuple):
    """What the host knows of a step's lengths. Attention in Triton needs it for its launches (chapter 1)."""
    max_query_len: int
    max_seq_len: int
    num_decodes: int | None = None  # those with one new token are among the first num_decodes; None: anywhere
    query_tiles: Tensor | None = None  # the work list of the others


@dataclass
class ModelConfig:
    """The switches; a rare one names its families. nanopaged/weights/families.py reads them from a config.json."""
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
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3, Gemma 3: of each head
    all_heads_norm: bool = False  # OLMo 2, 3, OLMoE: one norm over all heads of q, and one of k
    pre_norm: bool = True  # OLMo 2 and 3 have no norm in front of a sublayer
    post_norm: bool = False  # OLMo 2, 3, Gemma 3: a sublayer's result is normalised before the addition
    float32_norms: bool = False  # OLMo, Gemma 3: a norm multiplies in float32, then rounds
    norm_offset: float = 0.0  # Gemma 3 stores a norm's weight minus 1
    embedding_multiplier: float = 1.0  # Granite, Gemma 3
    attention_scale: float | None = None  # Granite, Gemma 3; None: head_dim ** -0.5
    logits_scaling: float = 1.0  # Granite divides the logits; build.py divides the last norm's weight instead
    tie_word_embeddings: bool = False
    learned_positions: bool = False
    position_offset: int = 0  # OPT's position table begins with two rows that no token uses
    ropes: list[dict[str, Any]] = field(default_factory=list)  # each: rope_theta, rope_type, that type's parameters
    layer_ropes: list[int] = field(default_factory=list)  # of each layer: its place in ropes, -1: no rope; []: all 0
    sliding_windows: list[int] = field(default_factory=list)  # of each layer; 0: a token sees itself and all before it
    groups: list[int] = field(default_factory=list)  # of each layer (nanopaged/features/kinds); []: all in one
    layer_heads: list[tuple[int, int]] = field(default_factory=list)  # num_kv_heads, head_dim of each; []: those above
    kv_sharing: list[int] = field(default_factory=list)  # of each layer: whose K and V it reads; []: its own
    states: dict[str, Any] = field(default_factory=dict)  # of layers without K and V (kinds/recurrent.py); {}: none
    experts: dict[str, Any] = field(default_factory=dict)  # those of nanopaged/features/experts.py; {}: none
    sinks: bool = False  # layers have sinks (nanopaged/features/gpt_oss.py)
    output_gate: bool = False  # attention has an output gate (nanopaged/features/qwen3_5.py)
    gemma4: dict[str, Any] = field(default_factory=dict)  # layers are those of nanopaged/features/gemma4.py; {}: not
    torch_dtype: torch.dtype = torch.float32
    fp8: str | None = None  # the checkpoint's matrices are FP8, with a scale for each "channel" or "block"
    four_bits: str | None = None  # the checkpoint has matrices of 4 bits, in "mxfp4" (nanopaged/features/four_bits.py)
    names: dict[str, str] = field(default_factory=dict)  # our module names -> the checkpoint's, where they differ
    merged: dict[str, dict[str, int]] = field(default_factory=dict)  # a stored matrix -> the rows of its parts
    parts: dict[str, dict[str, int]] = field(default_factory=dict)  # our matrix -> the rows of the stored ones in it
    orders: dict[str, list[int]] = field(default_factory=dict)  # our matrix -> where each of its rows is in these
    transposed: bool = False  # GPT-2 stores its matrices as [in, out]


class Transformer(nn.Module):
    """The decoder: a flat batch of tokens in, logits out."""
    rope_tables: list[Tensor]  # one for each of config.ropes; nanopaged/weights/build.py makes them

    def __init__(self, config: ModelConfig, modules: "Modules | None" = None) -> None:
        super().__init__()
        c, m = config, modules or PLAIN
        self.config, self.compute_logits = c, m.compute_logits
        self.embed_tokens = m.embedding(c.vocab_size, c.hidden_size)
        if c.learned_positions:
            self.embed_positions = Embedding(c.max_position_embeddings + c.position_offset, c.hidden_size)
        layers = [m.layer] * (c.num_layers - 1) + [m.last_layer]
        self.layers: Any = nn.ModuleList(layer(c, i, m) for i, layer in enumerate(layers))
        self.norm = m.norm(c, c.hidden_size)
        self.lm_head = self.embed_tokens if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, batch: Batch, kv_cache: list[LayerCache], kernels: Kernels, out: Tensor | None = None) -> Tensor:
        """Logits of batch.logits_indices, in `out` if given. kernels: chapter 1's functions, Triton's or torch's."""
        x, ropes = self.embed(batch)  # [T, D], and for each layer [T, head_dim]
        for layer, rope, cache in zip(self.layers, ropes, kv_cache):
            x = layer(x, rope, batch, cache, kernels)  # [T, D]; from the last layer [R, D]
        return self.compute_logits(self.norm(x), self.lm_head.weight, out)

    def embed(self, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
        """The tokens' vectors [T, D], and for each layer cosines and sines of rope's angles [T, head_dim], or None."""
        c, x = self.config, self.embed_tokens(batch.input_ids)
        if c.embedding_multiplier != 1:
            x = x * torch.tensor(c.embedding_multiplier, dtype=x.dtype)  # rounded to x's type, as in Gemma's training
        if c.learned_positions:
            x = x + self.embed_positions(batch.positions + c.position_offset)
        ropes = [*(table.index_select(0, batch.positions) for table in self.rope_tables), None]  # [-1]
        return x, [ropes[i] for i in c.layer_ropes or [0] * c.num_layers]


class Layer(nn.Module):
    """One decoder layer: attention, then the MLP."""

    def __init__(self, config: ModelConfig, index: int, modules: "Modules") -> None:
        super().__init__()
        c, m = config, modules
        self.config, self.window = c, c.sliding_windows[index] if c.sliding_windows else 0
        norm: Any = partial(m.norm, c, c.hidden_size)
        pre_norm, post_norm = norm if c.pre_norm else nn.Identity, norm if c.post_norm else nn.Identity
        self.input_layernorm, self.attention_post_norm = pre_norm(), post_norm()
        # One matrix computes q, k and v, and one gate and up: fewer, larger products are faster.
        self.qkv_proj = m.linear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=c.qkv_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = Norm(c, c.head_dim), Norm(c, c.head_dim)  # rotate_and_store uses their weights
        if c.all_heads_norm:
            self.q_norm, self.k_norm = Norm(c, c.num_heads * c.head_dim), Norm(c, c.num_kv_heads * c.head_dim)
        self.o_proj = m.residual_linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.post_attention_layernorm, self.mlp_post_norm = pre_norm(), post_norm()
        self.mlp = m.mlp(c, index, m)

    def forward(self, x: Tensor, rope: Tensor | None, batch: Batch, cache: LayerCache, kernels: Kernels) -> Tensor:
        """[T, D] -> [T, D]"""
        x = x + self.attention(self.input_layernorm(x), rope, batch, cache, kernels)
        return x + self.mlp_post_norm(self.mlp(self.post_attention_layernorm(x)))

    def attention(self, x: Tensor, rope: Tensor | None, batch: Batch, cache: LayerCache, kernels: Kernels) -> Tensor:
        """Write the new tokens' K and V into their slots, then attend through the block tables: [T, D] -> [T, D]."""
        c, (k_cache, v_cache, k_scale, v_scale) = self.config, cache
        qkv = self.qkv_proj(x)  # [T, (H + 2 KV) * head_dim]
        if c.all_heads_norm:
            q, k, v = qkv.split([n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)], dim=1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)
        qkv = qkv.view(len(x), -1, c.head_dim)  # [T, H + 2 KV, head_dim]
        norms = (self.q_norm.weight, self.k_norm.weight) if c.qk_norm else (None, None)
        # Norm, rope and storing k and v (`store_kv`) are bound by memory, so in Triton one launch does all three.
        q = kernels.rotate_and_store(qkv, c.num_heads, rope, *norms, c.norm_eps, k_cache, v_cache,
                                     batch.slot_mapping, k_scale, v_scale)
        o = kernels.attention(q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.query_start_loc,
                              c.attention_scale or c.head_dim ** -0.5, sliding_window=self.window, k_scale=k_scale,
                              v_scale=v_scale, **batch.metadata._asdict())  # [T, H, head_dim], like q
        return self.attention_post_norm(self.o_proj(o.flatten(1)))


class LastLayer(Layer):
    """Returns only the tokens whose logits are read, [R, D]: as a rule the last one of each sequence that samples. The
    others would predict tokens that the prompt has already, and each logit row takes vocab_size numbers."""

    def forward(self, x: Tensor, rope: Tensor | None, batch: Batch, cache: LayerCache, kernels: Kernels) -> Tensor:
        return select_rows(super().forward(x, rope, batch, cache, kernels), batch)


def select_rows(x: Tensor, batch: Batch) -> Tensor:
    """[T, ..] -> [R, ..]"""
    return x if batch.logits_indices is None else x.index_select(0, batch.logits_indices)


class MLP(nn.Module):
    """Two matrix products with a nonlinearity between them: [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, index: int, modules: "Modules") -> None:
        super().__init__()
        self.config, c, m = config, config, modules
        self.gate_up_proj = m.linear(c.hidden_size, c.intermediate_size * (2 if c.gated_mlp else 1), bias=c.mlp_bias)
        self.down_proj = m.residual_linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(activate(self.gate_up_proj(x), self.config.activation, self.config.gated_mlp))


class Embedding(nn.Module):
    """A table of vectors. (nn.Embedding imports a compiler on the meta device, which takes 2 seconds.)"""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Linear(nn.Module):
    """A matrix product: [T, in] -> [T, out]."""

    def __init__(self, size_in: int, size_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.empty(size_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMS norm, or layer norm: [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return kernel.rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


def compute_logits(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """[R, D], the weight of lm_head [vocab_size, D] -> [R, vocab_size]"""
    return torch.matmul(x, weight.T, out=out)


class Modules(NamedTuple):
    """The classes that a Transformer is made of, and a function. A runner may pass others, which compute the same
    faster (nanopaged/features/last_layer.py, and fused.py on a GPU) or on several GPUs."""
    embedding: type[Embedding] = Embedding
    layer: type[Layer] = Layer
    last_layer: type[Layer] = LastLayer
    mlp: Callable[..., nn.Module] = MLP  # of a layer; also many small ones (nanopaged/features/experts.py)
    norm: type[Norm] = Norm
    linear: Callable[..., Linear] = Linear
    residual_linear: Callable[..., Linear] = Linear  # o_proj and down_proj: results are added to the residual stream
    compute_logits: Callable[..., Tensor] = compute_logits


PLAIN: Modules = Modules()


gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "swish": F.silu, "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "gelu": F.gelu,
    "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh}


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """The MLP's nonlinearity: [T, intermediate] -> the same; gated, [T, 2 * intermediate] -> [T, intermediate]."""
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
