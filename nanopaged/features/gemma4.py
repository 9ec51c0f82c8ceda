"""Gemma 4 (Google 2026): heads of two sizes, K and V from one projection, and norms on both sides of each sublayer.

What its layers have besides those of Gemma 3:

    heads            Layers with a window have other heads than those that attend to all tokens, in 31B 16 kv heads of
                     256 numbers and 4 of 512. Both share one pool (kinds/device.py).
    k and v          v goes through a norm without a weight. With attention_k_eq_v the layers that attend to all tokens
                     have no v_proj: v is what k_proj gives, before k's norm and rope.
    scores           are not scaled: the norms of q and k bound them.
    rope             Of layers that attend to all tokens a quarter of the pairs rotates ("proportional", rope.py).
    layer_scalar     multiplies what a layer returns.
    logits           cap * tanh(logits / cap), with cap = final_logit_softcapping
    experts          (26B-A4B) stand beside the dense MLP. Both have a norm before and after them, and their sum has a
                     third. The router has a norm of its own, and each expert's score a factor.
    shared K and V   (E2B, E4B) The last num_kv_shared_layers layers compute q alone, and attend to K and V of the last
                     layer of their kind that has them. The pool has nothing for these layers. Their MLP is wider in
                     E2B.
    per-layer embeddings
                     (E2B, E4B) A second table, and the embedding, give each token a vector for each layer. A layer
                     adds its vector to the stream last, through a gate. The table may lie on the host
                     (`tables_on_host`).

In multimodal checkpoints this is the text model. Other parts (vision and audio towers) are not read.
"""
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanopaged import kernel, model, tiles
from nanopaged.inputs import between, check_number
from nanopaged.optional_triton import jit, launch_options, tl, triton
from nanopaged.options import feature
from nanopaged.weights import build, families

WIDE_PREFILL = {2: 96, 4: 128}  # KiB of shared memory with heads of 512 numbers, by bytes of a number
MOST_WEIGHTS = 0.75  # of the memory that the engine may have. The rest is for a step's tensors, and for K and V.
GATHER_TILE = 1024  # numbers: 16 bytes for each thread in 16 bits

# --------------------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------------------


class Gemma4Layer(model.Layer):
    """A layer with the heads of its kind."""

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        g, (num_kv_heads, head_dim) = config.gemma4, config.layer_heads[index]
        c = replace(config, num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=g["mlp_sizes"][index])
        super().__init__(c, index, modules)
        if (count := g["projections"][index]) < 2:
            self.qkv_proj = modules.linear(c.hidden_size, (c.num_heads + count * c.num_kv_heads) * c.head_dim,
                                           bias=c.qkv_bias)
        if not count:
            self.k_norm = self.q_norm  # there is no k
        if c.experts:  # DenseAndExperts has norms in front
            self.post_attention_layernorm = nn.Identity()
        self.layer_scalar = nn.Parameter(torch.empty(1))
        self.index, self.is_last, size = index, index == c.num_layers - 1, g["vector_size"]
        if size:
            self.per_layer_input_gate = modules.linear(c.hidden_size, size, bias=False)
            self.per_layer_projection = modules.linear(size, c.hidden_size, bias=False)
            self.post_per_layer_input_norm = modules.norm(c, c.hidden_size)
        self.vectors = LayerVectors(c, modules) if size and not index else None

    def forward(self, x: Any, rope: Tensor | None, batch: Any, cache: model.LayerCache,
                kernels: kernel.Kernels) -> Tensor:
        if self.vectors is not None:
            batch.layer_vectors = self.vectors(x, batch.input_ids)  # the later layers read them, too
        x = super().forward(x, rope, batch, cache, kernels)
        if self.config.gemma4["vector_size"]:
            x = x + self.post_per_layer_input_norm(self.gated_vectors(x, batch))
        return x * self.layer_scalar

    def gated_vectors(self, x: Tensor, batch: Any) -> Tensor:
        """[T, D] -> [T, D], without the norm behind"""
        vectors = batch.layer_vectors[:, self.index]
        vectors = model.select_rows(vectors, batch) if self.is_last else vectors
        gate = model.ACTIVATIONS[self.config.activation](self.per_layer_input_gate(x))
        return self.per_layer_projection(gate * vectors)

    def attention(self, x: Tensor, rope: Tensor | None, batch: model.Batch, cache: model.LayerCache,
                  kernels: kernel.Kernels) -> Tensor:
        store = rotate_and_store if kernels.in_triton else rotate_and_store_reference
        return super().attention(x, rope, batch, cache, kernels._replace(rotate_and_store=store))


class LateNorm(model.Norm):
    """The norm behind a sublayer, which is applied where the sublayer's result is added (`add_norms`)."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Late(NamedTuple):
    """(residual + norm(x)) * scalar, not computed yet: the next norm's launch does that."""
    x: Tensor  # [T, D], or partial products of it [count, T, D]
    norm: nn.Module
    residual: Tensor  # [T, D]
    scalar: Tensor | None = None  # [1]

    def then(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """(norm(sum), sum)"""
        return add_norms(self.x, self.norm.weight, self.residual, self.scalar, norm.weight, norm.eps)


class FusedGemma4Layer(Gemma4Layer):
    """With the modules of fused.py. It returns a `Late`, the last layer a tensor."""
    keep: Callable[..., Tensor]  # fused.py's

    def __init__(self, config: model.ModelConfig, index: int, modules: model.Modules) -> None:
        super().__init__(config, index, modules)
        for name in ("attention_post_norm", "mlp_post_norm", "post_per_layer_input_norm"):
            if hasattr(self, name):
                setattr(self, name, LateNorm(config, config.hidden_size))

    def forward(self, x: Any, rope: Tensor | None, batch: Any, cache: model.LayerCache,
                kernels: kernel.Kernels) -> Any:
        if self.vectors is not None:
            batch.layer_vectors = self.vectors(x, batch.input_ids)
        x, residual = x.then(self.input_layernorm) if isinstance(x, Late) else (self.input_layernorm(x), x)
        x = self.attention(x, rope, batch, cache, kernels)
        late = Late(x, self.attention_post_norm, self.keep(residual, batch))
        if self.config.experts:
            for_dense, residual = late.then(self.mlp.dense_norm)
            x = self.mlp(residual, for_dense)
        else:
            x, residual = late.then(self.post_attention_layernorm)
            x = self.mlp(x)
        late = Late(x, self.mlp_post_norm, residual, self.layer_scalar)
        if self.config.gemma4["vector_size"]:
            _, x = late._replace(scalar=None).then(self.mlp_post_norm)  # any norm will do: the sum alone is used
            late = Late(self.gated_vectors(x, batch), self.post_per_layer_input_norm, x, self.layer_scalar)
        return late.then(late.norm)[1] if self.is_last else late


class LayerVectors(nn.Module):
    """The vectors of all layers, [T, num_layers, vector_size], of the tokens' embeddings [T, D] and ids [T]. The first
    layer has this module."""

    def __init__(self, config: model.ModelConfig, modules: model.Modules) -> None:
        super().__init__()
        c, self.size = config, config.gemma4["vector_size"]
        self.embed_tokens_per_layer = modules.embedding(c.vocab_size, c.num_layers * self.size)
        self.per_layer_model_projection = model.Linear(c.hidden_size, c.num_layers * self.size, bias=False)
        self.per_layer_projection_norm = modules.norm(c, self.size)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        projected = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        projected = self.per_layer_projection_norm(projected.view(-1, self.size))
        table = self.embed_tokens_per_layer.weight
        vectors = self.embed_tokens_per_layer(ids) if table.device == ids.device else gather_rows(table, ids)
        vectors = vectors.view(-1, self.size) * self.size ** 0.5
        return ((projected + vectors) * 2 ** -0.5).view(len(x), -1, self.size)


def tables_on_host(types: dict[nn.Parameter, torch.dtype], built: Any, device: Any,
                   utilization: float) -> dict[nn.Parameter, Tensor]:
    """{the second table of embeddings: pinned memory for it}, if beside all weights a card would have too little memory
    left. E2B's table takes 4.4 of 9.5 GiB, and a step reads a row of it for each token: 17.5 KiB.

    types: of all parameters; utilization: the share of the card's memory that the engine may have. ValueError: the host
    lacks the memory."""
    if built.layers[0].vectors is None or not triton:
        return {}
    table, (free, total) = built.layers[0].vectors.embed_tokens_per_layer.weight, torch.cuda.mem_get_info(device)
    size = sum(parameter.numel() * dtype.itemsize for parameter, dtype in types.items())
    if size <= MOST_WEIGHTS * (utilization * total - (total - free)):
        return {}
    told = f"the table of embeddings for each layer, {table.numel() * types[table].itemsize / 2**30:.1f} GiB,"
    with build.memory_for(f"{told} fits neither into {device} nor into the host's memory; use a smaller model"):
        pinned = torch.empty(table.shape, dtype=types[table], pin_memory=True)
    warnings.warn(f"{told} stays in the host's memory, because beside it {device} would have too little for K and V")
    return {table: pinned}


def rotate_and_store_reference(qkv: Tensor, num_heads: int, rotation: Tensor, q_norm: Tensor, k_norm: Tensor,
                               eps: float, k_cache: Tensor, *more: Any) -> Tensor:
    """`kernel.rotate_and_store_reference` with a norm of v. Where qkv has no v, v is k before its norm. Where it has
    neither, nothing is stored."""
    num_kv_heads = k_cache.shape[2]
    if qkv.shape[1] == num_heads:
        return kernel.rotate(kernel.rms_norm(qkv, q_norm, eps), rotation[:, None])
    v = qkv[:, -num_kv_heads:]
    v = kernel.rms_norm(v, torch.ones(v.shape[-1], device=v.device), eps)
    qkv = torch.cat([qkv[:, :num_heads + num_kv_heads], v], dim=1)
    return kernel.rotate_and_store_reference(qkv, num_heads, rotation, q_norm, k_norm, eps, k_cache, *more)


def rotate_and_store(qkv: Tensor, num_heads: int, rotation: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float,
                     k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: float = 1.0,
                     v_scale: float = 1.0) -> Tensor:
    """`rotate_and_store_reference` in one launch."""
    (num_tokens, num_rows, head_dim), num_kv_heads = qkv.shape, k_cache.shape[2]
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    rotate_and_store_kernel[(num_tokens, 1 if num_rows == num_heads else 2)](
        qkv, q, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, 1 / k_scale, 1 / v_scale, qkv.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3], V_HEAD=num_rows - num_kv_heads,
        **tiles.store_constants(num_heads, num_kv_heads, head_dim, k_cache.shape[1]), **launch_options(qkv.device))
    return q


@jit
def rotate_and_store_kernel(qkv, q_out, rotation, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping, k_factor,
                            v_factor, qkv_token, kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head,
                            V_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
                            KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_PADDED: tl.constexpr,
                            KV_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (token, 2), as chapter 1's. V_HEAD: the place of v's first head in qkv"""
    token = tl.program_id(0).to(tl.int64)
    at, rotation = qkv + token * qkv_token, rotation + token * 2 * HALF
    i = tl.arange(0, HALF_PADDED)[None, :]
    if tl.program_id(1) == 0:
        head = tl.arange(0, HEADS_PADDED)[:, None]
        valid = (head < HEADS) & (i < HALF)
        q_a, q_b = kernel._norm_and_rope(at, head, i, valid, q_norm, rotation, eps, HALF, True, True, PDL)
        q_at = q_out + (token * HEADS + head) * 2 * HALF + i
        tl.store(q_at, q_a, mask=valid)
        tl.store(q_at + HALF, q_b, mask=valid)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kv_head = tl.arange(0, KV_PADDED)[:, None]
        written = (kv_head < tl.where(slot >= 0, KV_HEADS, 0)) & (i < HALF)
        k_a, k_b = kernel._norm_and_rope(at + HEADS * 2 * HALF, kv_head, i, written, k_norm, rotation, eps, HALF, True,
                                         True, PDL)
        k_at = k_cache + block * kc_block + offset * kc_slot + kv_head * kc_head + i
        kernel._store(k_at, k_a, k_factor, written)
        kernel._store(k_at + HALF, k_b, k_factor, written)
        v_a, v_b = kernel._norm_and_rope(at + V_HEAD * 2 * HALF, kv_head, i, written, k_norm, rotation, eps, HALF,
                                         False, False, False)  # no rope, and a norm without a weight
        scale = 1.0 / tl.sqrt((tl.sum(v_a * v_a, 1) + tl.sum(v_b * v_b, 1)) / (2 * HALF) + eps)[:, None]
        v_at = v_cache + block * vc_block + offset * vc_slot + kv_head * vc_head + i
        kernel._store(v_at, v_a * scale, v_factor, written)
        kernel._store(v_at + HALF, v_b * scale, v_factor, written)


def add_norms(x: Tensor, post: Tensor, residual: Tensor, scalar: Tensor | None, weight: Tensor,
              eps: float) -> tuple[Tensor, Tensor]:
    """(norm(sum), sum), sum = (residual + norm(x)) * scalar, each [T, D], in one launch. x [T, D], or partial products
    of it [count, T, D]; post, weight: of the norms, [D]"""
    (num_rows, size), out, total = residual.shape, torch.empty_like(residual), torch.empty_like(residual)
    padded = tiles.next_power_of_2(size)
    in_chain = feature("fused", "Gemma 4 with small kernels").is_in_chain(x)
    add_norms_kernel[(num_rows,)](
        x, post, residual, scalar, weight, out, total, eps, num_rows, COUNT=len(x) if x.dim() == 3 else 1, SIZE=size,
        PADDED=padded, num_warps=min(16, max(4, padded // 128)), **launch_options(residual.device, in_chain=in_chain))
    return out, total


@jit
def add_norms_kernel(x, post, residual, scalar, weight, out, total, eps, num_rows, COUNT: tl.constexpr,
                     SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (token,). Rounded as in plain torch: after each norm, the addition and the product."""
    i = tl.arange(0, PADDED)
    inside, row = i < SIZE, tl.program_id(0).to(tl.int64)
    at = row * SIZE + i
    first, second = tl.load(post + i, mask=inside, other=0.0), tl.load(weight + i, mask=inside, other=0.0)
    kernel.wait_for_previous_kernel(PDL)
    y = tl.zeros([PADDED], tl.float32)
    for n in tl.static_range(COUNT):
        y += tl.load(x + (n * num_rows + row) * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    y = y.to(total.dtype.element_ty).to(tl.float32)
    y = y / tl.sqrt(tl.sum(y * y, 0) / SIZE + eps) * first.to(tl.float32)
    y = y.to(total.dtype.element_ty).to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if scalar is not None:
        y = y.to(total.dtype.element_ty).to(tl.float32) * tl.load(scalar).to(tl.float32)
    rounded = y.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    y = rounded.to(tl.float32)
    y = y / tl.sqrt(tl.sum(y * y, 0) / SIZE + eps) * second.to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids], [T, size], of a table in pinned memory of the host. The kernel reads the rows there (zero-copy). The
    host cannot copy them: when it launches a step, it does not know the ids that the step before samples."""
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=ids.device)
    gather_rows_kernel[(len(ids), tiles.cdiv(size, GATHER_TILE))](
        table, ids, out, SIZE=size, TILE=GATHER_TILE, **launch_options(ids.device, in_chain=False))  # it does not wait
    return out


@jit
def gather_rows_kernel(table, ids, out, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid (token, tile)"""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = table + tl.load(ids + row).to(tl.int64) * SIZE + i
    tl.store(out + row * SIZE + i, tl.load(at, mask=i < SIZE), mask=i < SIZE)


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py. ValueError: the GPU has too little shared memory."""
    c, make = r.config, partial(torch.zeros, dtype=r.dtype, device=r.device)
    norm, heads = partial(torch.zeros, dtype=torch.float32, device=r.device), c.layer_heads
    widest = max(head_dim for _, head_dim in heads)
    needed, there = WIDE_PREFILL[r.dtype.itemsize] if widest > 256 else 0, tiles.shared_memory(r.device) >> 10
    if there < needed:
        raise ValueError(f"heads of {widest} numbers in {str(r.dtype).removeprefix('torch.')} need {needed} KiB of "
                         f"shared memory for a block, and {r.device} has {there}; use 16 bits on a GPU of compute "
                         "capability 8.0 or more, or attention='torch'")
    for (num_kv_heads, head_dim), count in {*zip(heads, c.gemma4["projections"])}:
        cache = r.pool.one_block(heads.index((num_kv_heads, head_dim)))
        yield partial(rotate_and_store, make(0, c.num_heads + count * num_kv_heads, head_dim), c.num_heads,
                      norm(0, head_dim), norm(head_dim), norm(head_dim), c.norm_eps, cache, cache,
                      torch.zeros(0, dtype=torch.int32, device=r.device))
    if size := c.gemma4["vector_size"]:
        yield partial(gather_rows, make(1, c.num_layers * size), torch.zeros(0, dtype=torch.int32, device=r.device))
    if r.modules.norm is not model.PLAIN.norm:
        fused, weight = feature("fused", "Gemma 4 with small kernels"), norm(c.hidden_size)
        for shape, scalar in itertools.product(fused.sum_shapes(r), (None, make(1))):
            yield partial(add_norms, make(*shape, c.hidden_size), weight, make(shape[-1], c.hidden_size), scalar,
                          weight, c.norm_eps)


def capped(compute_logits: Callable[..., Tensor], cap: float, *args: Any) -> Tensor:
    logits = compute_logits(*args)
    return logits.div_(cap).tanh_().mul_(cap)


class DenseAndExperts(nn.Module):
    """Both MLPs of a layer of 26B-A4B: [T, D] -> [T, D], of what no norm has changed."""

    def __init__(self, make: Callable[..., nn.Module], config: model.ModelConfig, index: int,
                 modules: model.Modules) -> None:
        """make: with_experts's"""
        super().__init__()
        norm = partial(modules.norm, config, config.hidden_size)
        self.dense_norm, self.dense_post_norm = norm(), norm()
        self.router_norm, self.experts_norm, self.experts_post_norm = norm(), norm(), norm()
        self.dense = make(replace(config, experts=config.experts | {"dense_layers": [index]}), index, modules)
        self.mixture = make(config, index, modules)

    def forward(self, x: Tensor, for_dense: Tensor | None = None) -> Tensor:
        """for_dense: dense_norm(x), if that is there"""
        mixed = self.mixture(self.experts_norm(x), self.router_norm(x))
        dense = self.dense(self.dense_norm(x) if for_dense is None else for_dense)
        return self.dense_post_norm(dense) + self.experts_post_norm(mixed)


def with_layers(modules: model.Modules, config: model.ModelConfig) -> model.Modules:
    """The modules with these layers and logits, made of those of other models."""
    own = Gemma4Layer if modules.norm is model.PLAIN.norm else FusedGemma4Layer
    layer, last_layer = (type(kind.__name__, (own, kind), {}) for kind in (modules.layer, modules.last_layer))
    if config.experts:
        modules = modules._replace(mlp=partial(DenseAndExperts, modules.mlp))
    if cap := config.gemma4["softcap"]:
        modules = modules._replace(compute_logits=partial(capped, modules.compute_logits, cap))
    return modules._replace(layer=layer, last_layer=last_layer)


# --------------------------------------------------------------------------------------------------
# The families
# --------------------------------------------------------------------------------------------------

# config.json may name only what differs from these.
DEFAULTS: dict[str, Any] = dict(
    vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, global_head_dim=512, hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=131072, tie_word_embeddings=True, sliding_window=512, hidden_size_per_layer_input=256)
ROPES: dict[str, dict[str, Any]] = {
    families.FULL: dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
    families.SLIDING: dict(rope_type="default", rope_theta=1e4)}


def gemma4(hf: dict[str, Any]) -> model.ModelConfig:
    hf = DEFAULTS | {key: value for key, value in hf.items() if value is not None or "per_layer" in key}
    num_layers = families.check_size("num_layers", hf["num_hidden_layers"])
    if hf.get("use_bidirectional_attention") == "all":
        raise ValueError("Gemma 4 with use_bidirectional_attention='all' is not supported: each of its tokens attends "
                         "to later ones, and a decoder has none")
    kinds = [*(hf.get("layer_types") or [])[:-1], families.FULL]  # whatever config.json says of the last one
    is_local = families.windows(hf | {"sliding_window": 1, "layer_types": kinds if len(kinds) > 1 else None},
                                lambda i: (i + 1) % 6 != 0 and i + 1 < num_layers)
    given = ROPES | (hf.get("rope_parameters") or {})
    if given.keys() - ROPES:
        raise ValueError(f"Gemma 4 needs rope_parameters of {families.FULL!r} and {families.SLIDING!r}, not one for "
                         "all layers")
    config = families.llama(
        hf, mlp_bias=False, qk_norm=True, **families.POST, activation=hf["hidden_activation"],
        embedding_multiplier=hf["hidden_size"] ** 0.5, attention_scale=1.0, layer_ropes=is_local,
        ropes=[families.rope_settings(hf | {"rope_parameters": given[kind]}, True)
               for kind in (families.FULL, families.SLIDING)],
        sliding_windows=[hf["sliding_window"] * i for i in is_local])
    config.names = config.names | {"post_attention_layernorm": "pre_feedforward_layernorm"}
    if (cap := hf.get("final_logit_softcapping")) is not None:
        check_number("config.json: final_logit_softcapping", cap, (int, float), lambda x: 0 < x < 1e15,
                     "a number above 0 and below 1e15")
    num_shared = check_number("config.json: num_kv_shared_layers", hf.get("num_kv_shared_layers", 0),
                              *between(int, 0, num_layers - 1))
    one_projection, first = bool(hf.get("attention_k_eq_v")), num_layers - num_shared
    wide = config.intermediate_size * (2 if hf.get("use_double_wide_mlp") else 1)
    config.gemma4 = dict(
        softcap=cap, projections=[2 if local or not one_projection else 1 for local in is_local[:first]]
        + [0] * num_shared, mlp_sizes=[config.intermediate_size] * first + [wide] * num_shared,
        vector_size=hf["hidden_size_per_layer_input"] or 0)
    read_heads(config, hf, one_projection)
    if num_shared:
        last = {kind: i for i, kind in enumerate(zip(is_local[:first], config.layer_heads[:first]))}
        sources = [last.get(kind, -1) for kind in zip(is_local[first:], config.layer_heads[first:])]
        if -1 in sources:
            raise ValueError(f"config.json: num_kv_shared_layers is {num_shared}, but before these layers none of the "
                             f"kind of layer {first + sources.index(-1)} has K and V")
        config.kv_sharing = [*range(first), *sources]
    config.num_kv_heads, config.head_dim = config.layer_heads[0]  # what a pool has whose layers are all alike
    if config.gemma4["vector_size"]:
        families.check_size("hidden_size", config.gemma4["vector_size"])
        families.require("Gemma 4", hf, dict(vocab_size_per_layer_input=config.vocab_size))
        config.names |= {f"layers.0.vectors.{name}.weight": f"{name}.weight" for name in (
            "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")}
    if hf.get("enable_moe_block"):
        add_experts(config, hf)
    return config


def read_heads(config: model.ModelConfig, hf: dict[str, Any], one_projection: bool) -> None:
    """config.layer_heads. transformers 5 writes per_layer_config, which counts, in place of two keys."""
    full = dict(head_dim=hf["global_head_dim"])
    if one_projection and hf.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    layers = hf.get("per_layer_config") or {i: full for i, local in enumerate(config.layer_ropes) if not local}
    config.layer_heads = [(config.num_kv_heads, config.head_dim)] * config.num_layers
    for index, heads in layers.items():
        if not {*heads} <= {"head_dim", "num_key_value_heads"} or not str(index).isdecimal() or (
                int(index) >= config.num_layers):
            raise ValueError("config.json: per_layer_config says head_dim and num_key_value_heads of a layer's number, "
                             f"below {config.num_layers}, not {index!r:.40}: {heads!r:.80}")
        changed = replace(config, num_kv_heads=heads.get("num_key_value_heads", config.num_kv_heads),
                          head_dim=heads.get("head_dim", config.head_dim))
        families.check_config(changed)
        config.layer_heads[int(index)] = changed.num_kv_heads, changed.head_dim
    for kind, rope in enumerate(config.ropes):
        sizes = {heads[1] for heads, local in zip(config.layer_heads, config.layer_ropes) if local == kind}
        if len(sizes) > 1:
            raise ValueError(f"config.json: per_layer_config has head_dim {' and '.join(map(str, sorted(sizes)))} in "
                             "layers with one rope; expected one size")
        rope["head_dim"] = min(sizes, default=config.head_dim)


def add_experts(config: model.ModelConfig, hf: dict[str, Any]) -> None:
    """26B-A4B's: DenseAndExperts under the checkpoint's names."""
    experts = feature("experts", "Gemma 4 with experts")
    config.experts = experts.mixture({"num_experts_per_tok": hf["top_k_experts"]} | hf, "num_experts",
                                     "moe_intermediate_size", True) | {"has_scale": True}
    config.names |= {
        "mlp": "", "dense": "mlp", "mixture": "", "router": "router.proj", "expert_scale": "router.per_expert_scale",
        "dense_norm": "pre_feedforward_layernorm", "dense_post_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2", "experts_post_norm": "post_feedforward_layernorm_2"}
    config.names |= {f"layers.{i}.mlp.router_norm.weight": f"layers.{i}.router.scale" for i in range(config.num_layers)}
    config.merged = {
        "experts.gate_up_proj": dict.fromkeys(("experts.{}.gate_proj", "experts.{}.up_proj"), config.experts["size"]),
        "experts.down_proj": {"experts.{}.down_proj": config.hidden_size}}
