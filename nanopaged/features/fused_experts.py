"""A mixture of experts in three launches: the choice, and two products. The addition to experts.py that a GPU runs.

In a product the tokens of an expert are the columns of a tile:

    token                   a    b    c
    its experts             2 0  2 0  1 2        the best first
    tokens of the experts   0: a b   1: c   2: a b c
    results                 2(a) 2(b) 1(c)       times the scores; the norm that follows adds the rows up, in this order
                            0(a) 0(b) 2(c)

Nothing waits for the host, and shapes follow from the number of tokens, so a step can be recorded. A token's results
are added up in the order of its experts, whatever other tokens there are. (With weights in 4 bits last bits depend on
the number of tokens, which decides how many partial sums a product has.)
"""
from functools import partial
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from nanopaged import kernel, model, tiles
from nanopaged.device.pool import FP8
from nanopaged.features import fused
from nanopaged.features.experts import SMALLEST_SUM, Experts
from nanopaged.optional_triton import jit, launch_options, tl
from nanopaged.tiles import cdiv

LARGEST = tl.constexpr(3e38)  # of the router's logits; padding may hold anything
LEAST = tl.constexpr(SMALLEST_SUM)
MOST_PARTS, ROUTER_FORM = 15, dict(ROWS=16, TILE=64, STAGES=4)  # of a router's product (the fastest of 9 to 12, H200)


class Counts:
    """How many pairs each expert has, for all mixtures of a step. The first one sets them to 0 in one launch."""

    def __init__(self) -> None:
        self.num_mixtures, self.of_step = 0, torch.empty(0)

    def of_mixture(self, i: int, logits: Tensor, total: int) -> Tensor:
        """total: experts of the i-th mixture. The shared one is among them in some layers, and in others, where it has
        other bits, not. One token writes all counts, which therefore may be anything before."""
        if i == 0:
            make, most = logits.new_empty if logits.shape[-2] == 1 else logits.new_zeros, logits.shape[-1] + 1
            self.of_step = make(self.num_mixtures, cdiv(most, 4) * 4, dtype=torch.int32)  # rows of whole 16 bytes
        return self.of_step[i, :total]


class RouterLinear(fused.SplitLinear):
    """Returns logits [T, E], or partial products of them [count, T, E]. A router has few columns: without a split most
    multiprocessors have no work."""

    def forward(self, x: Tensor) -> Tensor:
        if (count := num_router_parts(x)) > 1:
            return fused.few_rows_linear(x, self.weight, self.bias, count=count, form=ROUTER_FORM)
        return super().forward(x)


def num_router_parts(x: Tensor) -> int:
    """The number of partial products of a router's logits. 1: x [T, D] has too many rows or too few columns, or is in
    float16, where a part may overflow although the whole does not."""
    if len(x) == 1 or x.dtype is torch.float16 or not fused.takes_rows(len(x), x.dtype, x.device):
        return 1
    size, unit = x.shape[1], fused.SPLIT_ALIGNMENT
    return next((n for n in range(MOST_PARTS, 1, -1) if size % (n * unit) == 0 and size >= 2 * n * unit), 1)


class FusedExperts(Experts):
    """Returns partial products [n, T, D], as fused.py's `Sum` has them: of each choice, and of the shared expert."""
    router_class = RouterLinear

    def __init__(self, counts: Counts, dense: Any, config: model.ModelConfig, index: int,
                 modules: model.Modules) -> None:
        super().__init__(dense, config, index, modules)
        mixtures = [i for i in range(config.num_layers) if i not in self.settings["dense_layers"]]
        counts.num_mixtures, self.counts, self.place = len(mixtures), counts, mixtures.index(index)

    @property
    def four_bits(self) -> Any:
        """What computes products of such weights (four_bit_experts.py); None: they have more bits."""
        return getattr(self.experts[0], "four_bits", None)

    def forward(self, x: Tensor, for_router: Tensor | None = None) -> Tensor:
        e, whole = self.settings, self.whole
        names = "gate_up_proj", "down_proj"
        scales, biases = ([whole[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in whole]
                          for kind in ("scale", "bias"))  # scales: of weights in 8 or 4 bits
        if self.four_bits:
            scales = [self.four_bits.kept_beside(whole, name) for name in names]
        logits = self.router(x if for_router is None else for_router)
        out = mix_experts(x, logits, whole["gate_up_proj.weight"], whole["down_proj.weight"], e["top_k"],
                          e["normalized"], self.activation, *scales, biases=biases, has_shared=self.joins_shared,
                          sigmoid=e["sigmoid"], expert_bias=self.expert_bias, expert_scale=self.expert_scale,
                          four_bits=self.four_bits, counts=self.counts.of_mixture(self.place, logits, len(
                              whole["gate_up_proj.weight"])))
        if self.shared is None or self.joins_shared:
            return out
        logits = logits.float() if logits.dim() == 2 else logits.float().sum(0)
        shared = self.run_shared(x, logits.to(x.dtype))
        return torch.cat([out, shared if shared.dim() == 3 else shared[None]])


def kernel_forms(r: Any) -> Iterator[Callable[[], Any]]:
    """For warmup.py. No expert has any tokens, so no weights are read."""
    c, dtype, device = r.config, r.dtype, r.device
    e, make = c.experts, partial(torch.empty, dtype=dtype, device=device)
    activation = e.get("activation", c.activation)
    kept = getattr(getattr(r.modules.linear, "plan", None), "forms", {})  # of weights in 4 bits
    joins_shared = bool(e["gate_rows"]) and e["shared_size"] == e["size"] and all(
        form == kept[path.replace("experts.0", "shared")] for path, form in kept.items() if ".experts.0." in path)
    rows, total, chosen = e["count"] + e["gate_rows"], e["count"] + joins_shared, e["top_k"] + joins_shared
    router = torch.empty(rows, c.hidden_size, dtype=dtype, device="meta")
    parts = {1, *(fused.split_of(make(n, c.hidden_size), router, c.mlp_bias)[0] for n in (2, fused.MOST_FEW_ROWS + 1))}
    for n in (2, 9, 17, 33):
        if (count := num_router_parts(make(n, c.hidden_size))) > 1:
            parts.add(count)
            yield partial(fused.few_rows_linear, make(n, c.hidden_size), make(0, c.hidden_size),
                          make(1) if c.mlp_bias else None, count=count, form=ROUTER_FORM)
    for count in parts:
        for num_rows in (0, 1):
            yield partial(route_experts, make(count, num_rows, rows), e["count"], e["top_k"], e["normalized"],
                          joins_shared, e["sigmoid"], make(e["count"], dtype=torch.float32) if e["has_bias"] else None,
                          make(e["count"]) if e.get("has_scale") else None)
    memory = tiles.shared_memory(device)
    counts, pairs = make(total, dtype=torch.int32).zero_(), make(0, dtype=torch.int32)
    weight, scale = make(0, dtype=FP8 if r.fp8 else dtype), make(0, dtype=torch.float32) if r.fp8 else None
    four_bits = getattr(r.modules.mlp, "four_bits", None)
    for name, size, act, out in (("gate_up_proj", c.hidden_size, activation, e["size"]),
                                 ("down_proj", e["size"], "", c.hidden_size)):
        if four_bits:
            weight, *scale = four_bits.empty_of(r, name, size)
        forms = {str([experts_form(n, chosen, total, act != "", weight.dtype, memory, four_bits),
                      four_bits and four_bits.form_of_few(n, chosen, total, act != "", size)]): n
                 for n in (*(2**i for i in reversed(range(20))), 9)}  # the fewest tokens of each form
        for n in forms.values():
            routed = make(chosen, n, dtype=torch.float32), counts, pairs
            yield partial(experts_product, make(0, size), weight, *routed, make(0, out), act, scale,
                          make(0) if c.mlp_bias else None, four_bits)
    norm = make(c.hidden_size, dtype=torch.float32 if c.float32_norms else dtype)
    parts = make(e["top_k"] + bool(e["shared_size"]), 1, c.hidden_size)
    yield partial(fused.fused_add_norm, parts, parts[0], norm, None, c.norm_eps)


# --------------------------------------------------------------------------------------------------
# The kernels
# --------------------------------------------------------------------------------------------------

def experts_form(num_rows: int, top_k: int, count: int, gated: bool, dtype: torch.dtype,
                 shared_memory: int, four_bits: Any = None) -> dict[str, Any]:
    """Of `experts_kernel`, for num_rows tokens that choose top_k of `count` experts each: rows of a weight and columns
    of a program, numbers of a row in a tile, and what the loop's pipeline holds. A program of few columns waits for
    memory, and one of many for the tensor cores. (H200, the shapes of Qwen3-30B-A3B and Qwen3.5-35B-A3B)"""
    if four_bits and not four_bits.are_many(num_rows, top_k, count):
        return four_bits.experts_form(num_rows, top_k, count, gated, shared_memory)
    dtype = torch.bfloat16 if four_bits else dtype  # widened then
    mean, is_large = num_rows * top_k / count, dtype.itemsize <= 2 and shared_memory > tiles.LARGE_SHARED_MEMORY
    most = 128 if is_large and mean >= 128 else 64
    # An expert of more tokens than columns has a second tile, which loads the weights again.
    columns = 8 if num_rows <= 8 else min(most, max(16, tiles.next_power_of_2(int(1.5 * mean))))
    rows, tile, stages, warps = 64, 64, 2, 4
    if is_large and columns <= 16:
        rows, tile, stages, warps = (64, 128, 3, 4) if gated else (128, 64, 4, 8)
    elif is_large:
        rows, tile, stages, warps = (128, 64, 4, 8) if gated else (256, 64, 3 if columns <= 32 else 4, 8)
        if columns > 64 and not gated:
            tile, stages = 32, 5
    return dict(ROWS=rows, COLUMNS=columns, TILE=tile * 2 // dtype.itemsize, STAGES=stages, num_warps=warps,
                PRODUCTS=None)


def mix_experts(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalized: bool, activation: str,
                *scales: Any, biases: Sequence[Tensor] = (), has_shared: bool = False,
                sigmoid: float = 0.0, expert_bias: Tensor | None = None, expert_scale: Tensor | None = None,
                four_bits: Any = None, counts: Tensor | None = None) -> Tensor:
    """`Experts.forward` of nanopaged/features/experts.py as partial products [top_k, T, D]: a token's results, times
    their scores. x [T, D], logits of the router [T, E] or partial products of it, gate_up [E, 2 * I, D], down [E, D,
    I]. scales: of weights in FP8, [E, 2 * I, 1] and [E, D, 1]; what is multiplied with these is quantised, too; of
    weights in 4 bits, what `four_bits.kept_beside` returns, where four_bits computes products (four_bit_experts.py).
    biases: [E, 2 * I] and [E, D], or none. has_shared: the last expert is the shared one, which is not chosen; its
    results come last, [top_k + 1, T, D]. sigmoid, expert_bias and expert_scale, [E] float32: of `choose_experts`
    there; counts: of `route_experts`"""
    (num_rows, size), inner = x.shape, gate_up.shape[1] // 2
    parts = top_k + has_shared
    hidden, out = x.new_empty(parts * num_rows, inner), x.new_empty(parts, num_rows, size)
    if num_rows:
        routed = route_experts(logits, len(gate_up) - has_shared, top_k, normalized, has_shared, sigmoid,
                               expert_bias, expert_scale, counts)
        experts_product(x, gate_up, *routed, hidden, activation, *(scales[:1] or [None]), *(biases[:1] or [None]),
                        four_bits)
        experts_product(hidden, down, *routed, out, "", *(scales[1:] or [None]), *(biases[1:] or [None]), four_bits)
    return out


def route_experts(logits: Tensor, count: int, top_k: int, normalized: bool, has_shared: bool = False,
                  sigmoid: float = 0.0, bias: Tensor | None = None,
                  scale: Tensor | None = None, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Pair n * T + t is token t with its n-th expert. Returns the pairs' scores [top_k, T]; for each expert, how many
    pairs it has, and in any order which ones: [E], [E, T]. count: experts to choose from, the first columns of logits.
    The shared expert is the (top_k + 1)-th of each token. counts: for the second result; zeros, but with one token"""
    num_rows, total, chosen = logits.shape[-2], count + has_shared, top_k + has_shared
    scores = logits.new_empty(chosen, num_rows, dtype=torch.float32)
    counts = logits.new_zeros(total, dtype=torch.int32) if counts is None else counts
    pairs = logits.new_empty(total, num_rows, dtype=torch.int32)
    route_kernel[(num_rows,)](
        logits, bias, scale, scores, counts, pairs, num_rows, EXPERTS=count, COLUMNS=logits.shape[-1],
        PADDED=tiles.next_power_of_2(count), TOP_K=top_k, CHOICES=tiles.next_power_of_2(chosen), NORMALIZED=normalized,
        SHARED=has_shared, SIGMOID=sigmoid, COUNT=len(logits) if logits.dim() == 3 else 1, ONE_TOKEN=num_rows == 1,
        num_warps=1,
        **launch_options(logits.device))
    return scores, counts, pairs


def experts_product(x: Tensor, weight: Tensor, scores: Tensor, counts: Tensor, pairs: Tensor, out: Tensor,
                    activation: str, scale: Any = None, bias: Tensor | None = None,
                    four_bits: Any = None) -> None:
    """Fill `out`, which has a row for each pair. With an activation: `activate` of the products, and x has a row for
    each token. Without: the products times their scores, and x has a row for each pair."""
    (top_k, num_rows), count = scores.shape, len(counts)
    if four_bits and four_bits.product_of_few(x, weight, scale, scores, counts, pairs, out, activation, bias):
        return
    if four_bits and four_bits.are_many(num_rows, top_k, count):
        weight, scale, four_bits = four_bits.widen(x.shape[1], x.dtype, weight, *scale), None, None
    memory = tiles.shared_memory(x.device)
    form = experts_form(num_rows, top_k, count, activation != "", weight.dtype, memory, four_bits)
    x, x_scale = fused.quantize_rows(x) if weight.dtype is FP8 and not four_bits else (x, x)
    # An expert has at most num_rows pairs, and all together have top_k * num_rows.
    num_tiles = min(top_k * num_rows, count) + (num_rows > form["COLUMNS"]) * top_k * num_rows // form["COLUMNS"]
    zero, row_scale, kept = None, None, dict(GROUPS=1, KIND="")
    if four_bits:
        scale, zero, row_scale = scale
        kept = dict(GROUPS=scale.shape[-1], KIND=four_bits.kind_of(weight.dtype, scale.dtype))
        weight = weight.view(torch.uint8)
        scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    experts_kernel[(cdiv(out.shape[-1], form["ROWS"]), num_tiles)](
        x, x_scale, weight, x if scale is None else scale, zero, row_scale, bias, scores, out, counts, pairs, num_rows,
        OUT=out.shape[-1], SIZE=x.shape[1], EXPERTS=count, PADDED=tiles.next_power_of_2(count), ACTIVATION=activation,
        **form, **kept, **launch_options(x.device))


@jit
def route_kernel(logits, bias, scale, scores, counts, pairs, num_rows, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
                 PADDED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, NORMALIZED: tl.constexpr,
                 SHARED: tl.constexpr, SIGMOID: tl.constexpr, COUNT: tl.constexpr, ONE_TOKEN: tl.constexpr,
                 PDL: tl.constexpr):
    """Grid (token,). `choose_experts`, and the token's pairs are added to those of its experts. Padding may hold
    anything. The experts of a token of padding differ, too, so that no expert has more pairs than there are tokens."""
    token, expert, n = tl.program_id(0), tl.arange(0, PADDED), tl.arange(0, CHOICES)
    kernel.wait_for_previous_kernel(PDL)
    x, shared = tl.zeros([PADDED], tl.float32), 0.0
    for part in tl.static_range(COUNT):
        at = logits + (part * num_rows + token).to(tl.int64) * COLUMNS
        x += tl.load(at + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
        if SHARED:
            shared += tl.load(at + EXPERTS).to(tl.float32)
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), -LARGEST)
    x = tl.where(expert < EXPERTS, x, -float("inf"))
    largest, score, chosen = tl.max(x, 0), tl.zeros([CHOICES], tl.float32), tl.zeros([CHOICES], tl.int32)
    SIGMOIDS: tl.constexpr = SIGMOID != 0
    parts = tl.sigmoid(x) if SIGMOIDS else tl.exp(x - largest)
    total = 1.0 if SIGMOIDS else tl.sum(parts, 0)
    if SIGMOIDS:
        x = tl.where(expert < EXPERTS, parts, -float("inf"))
    if bias is not None:
        x += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        x = tl.where(x == x, x, -LARGEST)
    # As integers in the same order, whose maximum over a warp is one instruction.
    key, bits = x.to(tl.int32, bitcast=True), parts.to(tl.int32, bitcast=True)
    key = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    for i in tl.static_range(TOP_K):
        at = tl.min(tl.where(key == tl.max(key, 0), expert, PADDED), 0)  # the first one of equal ones
        part = tl.max(tl.where(expert == at, bits, 0), 0).to(tl.float32, bitcast=True)
        score, chosen = tl.where(n == i, part, score), tl.where(n == i, at, chosen)
        key = tl.where(expert == at, -2**31, key)
    if NORMALIZED:
        total = tl.sum(score, 0) + (LEAST if SIGMOIDS else 0.0)
    score = score / total * SIGMOID if SIGMOIDS else score / total
    exists, pair = n < TOP_K, n * num_rows + token
    if scale is not None:
        score *= tl.load(scale + chosen, mask=exists, other=0.0).to(tl.float32)
    tl.store(scores + pair, score, mask=exists)
    place = 0
    if ONE_TOKEN:  # no launch has set the counts to 0
        is_chosen = (chosen[:, None] == expert[None, :]) & exists[:, None]
        tl.store(counts + expert, tl.sum(is_chosen.to(tl.int32), 0), mask=expert < EXPERTS)
    else:
        place = tl.atomic_add(counts + chosen, 1, mask=exists, sem="relaxed")
    tl.store(pairs + chosen * num_rows + place, pair, mask=exists)
    if SHARED:
        tl.store(scores + TOP_K * num_rows + token, tl.sigmoid(shared))
        tl.store(pairs + EXPERTS * num_rows + token, TOP_K * num_rows + token)
        tl.store(counts + EXPERTS, num_rows)


@jit
def experts_kernel(x, x_scale, weight, scale, zero, row_scale, bias, scores, out, counts, pairs, num_rows,
                   OUT: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                   ACTIVATION: tl.constexpr, PRODUCTS: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr,
                   PDL: tl.constexpr):
    """Grid (ROWS rows of a weight, COLUMNS pairs of one expert); programs behind the last pair end at once. With an
    activation it is the first product: a pair's x is its token's, the weight's first half is the gate. The second one
    has a row of x for each pair, and multiplies by scores. Rows and columns that do not exist load others', and are
    not stored. PRODUCTS: None, or what multiplies weights in 4 bits (four_bit_experts.py), which have GROUPS, KIND,
    zero and row_scale."""
    expert, tile = tl.arange(0, PADDED), tl.program_id(1)
    FIRST: tl.constexpr = ACTIVATION != ""
    WAITS: tl.constexpr = PDL and FIRST  # the second product reads nothing of the previous kernel's before x
    kernel.wait_for_previous_kernel(WAITS)
    # From L2: kernels before the previous one have written the pairs and their counts, and L1 may hold older ones.
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0, cache_modifier=".cg")
    # 2, 0 and 5 pairs, COLUMNS 4: experts end with tiles 1 1 3. Tile 2 is expert 2's, whose tile 2 - 3 + 2 = 1 it is.
    end_tile = tl.cumsum(tl.cdiv(count, COLUMNS), 0)
    at = tl.sum((end_tile <= tile).to(tl.int32), 0)  # the expert of this tile
    if at >= EXPERTS:
        kernel.wait_for_previous_kernel(PDL and not WAITS)
        return
    count = tl.sum(tl.where(expert == at, count, 0), 0)
    tile = tile - tl.sum(tl.where(expert == at, end_tile, 0), 0) + tl.cdiv(count, COLUMNS)
    column, i = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.load(pairs + at * num_rows + column, mask=column < count, other=0, cache_modifier=".cg")
    source = pair % num_rows if FIRST else pair
    kernel.wait_for_previous_kernel(PDL and not WAITS)
    x_at = x + source.to(tl.int64)[None, :] * SIZE
    weight_row = at.to(tl.int64) * (2 * OUT if FIRST else OUT) + tl.minimum(row, OUT - 1)
    sums, up_sums = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    if PRODUCTS is not None:
        sums, up_sums = PRODUCTS(x_at, (column < count)[None, :], weight, scale, zero, row_scale, weight_row, OUT,
                                 SIZE, GROUPS, KIND, TILE, STAGES, FIRST)
    else:
        x_at, gate_at = x_at + i[:, None], weight + weight_row[:, None] * SIZE + i[None, :]
        for k in tl.range(0, SIZE, TILE, num_stages=STAGES):
            factors = load_part(x_at + k, k + i[:, None], SIZE, TILE)
            sums = tl.dot(load_part(gate_at + k, k + i[None, :], SIZE, TILE), factors, sums, input_precision="ieee")
            if FIRST:
                up = load_part(gate_at + OUT * SIZE + k, k + i[None, :], SIZE, TILE)
                up_sums = tl.dot(up, factors, up_sums, input_precision="ieee")
    if weight.dtype.element_ty == tl.float8e4nv:
        of_column = tl.load(x_scale + source)[None, :]
        sums = sums * of_column * tl.load(scale + weight_row)[:, None]
        if FIRST:
            up_sums = up_sums * of_column * tl.load(scale + weight_row + OUT)[:, None]
    if bias is not None:
        sums += tl.load(bias + weight_row).to(tl.float32)[:, None]
        if FIRST:
            up_sums += tl.load(bias + weight_row + OUT).to(tl.float32)[:, None]
    if FIRST:
        y = fused.activate_tile(sums.to(out.dtype.element_ty), up_sums.to(out.dtype.element_ty), True, ACTIVATION)
    else:
        y = (sums * tl.load(scores + pair)[None, :]).to(out.dtype.element_ty)
    out_at = out + pair.to(tl.int64)[None, :] * OUT + row[:, None]
    tl.store(out_at, y, mask=(row < OUT)[:, None] & (column < count)[None, :])


@jit
def load_part(at, i, SIZE: tl.constexpr, TILE: tl.constexpr):
    """A tile along the inner dimension; the last one may be longer than that."""
    return tl.load(at) if SIZE % TILE == 0 else tl.load(at, mask=i < SIZE, other=0.0)
