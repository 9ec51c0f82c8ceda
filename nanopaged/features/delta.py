"""Gated delta nets: three of four layers of Qwen3-Next and Qwen3.5 have one in place of attention (Yang et al. 2024).

**The state.** Attention keeps K and V of each token. Here a head keeps one matrix S [k_dim, v_dim], however long the
text is. It answers a key k with S^T k. A token corrects what S answers to the token's key, then reads S (`delta_rule`):

    S = exp(g) * S                           forget some of it: g <= 0
    S = S + k * (beta * (v - S^T k))^T       for beta = 1, S now answers k with v
    o = S^T q

g and beta are scalars of the token and the head. Several value heads share a head of q and k.

**Before it**, a short convolution mixes each channel of q, k and v with those of the three tokens before. These inputs
are the layer's second state. It is a ring: the input of position p is entry p % taps of a slot, so no entry ever moves,
and who reads positions p - 3 to p - 1 does not meet who writes p. **Behind it**, a norm of each head, and a gate.

**Chunks.** One token after the other is slow for a prompt. The tokens of a chunk give matrix products and a triangular
system (`chunk`; section 3 of the paper). G is the sum of g from the chunk's beginning to a token, and S the state
before the chunk:

    A[i, j] = beta_i * exp(G_i - G_j) * (k_i . k_j) for j < i, else 0
    u = (I + A)^-1 (beta * v)        w = (I + A)^-1 (beta * exp(G) * k)        new = u - w S
    o = exp(G) * (q S) + P new,      P[i, j] = exp(G_i - G_j) * (q_i . k_j) for j <= i
    S = exp(G_last) * S + (exp(G_last - G) * k)^T new

Where a chunk ends changes the last bits, so chunks end at multiples of CHUNK positions, however a prompt is divided
into steps. The prefix cache keeps snapshots of both states at such positions (kinds/states.py).

This file is the plain form; delta_kernels.py computes the same in a few launches on a GPU.
"""
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged import model
from nanopaged.features.kinds.chunks import scan
from nanopaged.features.kinds.recurrent import Convolution, StateLayer, StateSlots
from nanopaged.inputs import between, check_number

CHUNK = 64  # tokens
NORM_EPS = 1e-6  # of the norms of q and k


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N texts: q and k [N, H, k_dim], v [N, H, v_dim], g and beta [N, H], state [N, H, k_dim,
    v_dim] -> (o like v, state)"""
    state = g.exp()[..., None, None] * state
    answer = torch.einsum("nhk,nhkv->nhv", k, state)
    correction = beta[..., None] * (v - answer)
    state = state + k[..., None] * correction[..., None, :]
    return torch.einsum("nhk,nhkv->nhv", q, state), state


class Weights(NamedTuple):
    """What a layer has besides its projections, and its shape."""
    conv: Tensor  # [channels, taps], the oldest token first; channels: q, then k, then v of all heads
    A_log: Tensor  # [v_heads]
    dt_bias: Tensor  # [v_heads]
    norm: Tensor  # [v_dim]
    eps: float  # of that norm
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int


def gated_delta(qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, w: Weights, states: list[Tensor],
                slots: StateSlots) -> Tensor:
    """The layer between its projections: qkv [T, channels], z [T, v_heads, v_dim], b and a [T, v_heads] -> like z, in
    its type. The states after the step are written into the slots: states[0] the convolution's inputs [slots, taps,
    channels], states[1] S of all heads [slots, v_heads, k_dim, v_dim]."""
    q, k, v = F.silu(convolve(qkv.float(), w, states[0], slots)).split(
        [w.k_heads * w.k_dim, w.k_heads * w.k_dim, w.v_heads * w.v_dim], dim=1)
    q, k = (one.unflatten(1, (w.k_heads, w.k_dim)) for one in (q, k))
    q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + NORM_EPS) for one in (q, k))
    q, k = (one.repeat_interleave(w.v_heads // w.k_heads, 1) for one in (q * w.k_dim ** -0.5, k))
    beta, g = b.float().sigmoid(), -w.A_log.float().exp() * F.softplus(a.float() + w.dt_bias.float())
    o = scan(delta_rule, chunk, (q, k, v.unflatten(1, (w.v_heads, w.v_dim))), (g, beta), states[1], slots)
    o = F.rms_norm(o, o.shape[-1:], w.norm.float(), w.eps) * F.silu(z.float())
    return o.to(z.dtype)


def convolve(x: Tensor, w: Weights, states: Tensor, s: StateSlots) -> Tensor:
    """The causal convolution, float32: x [T, channels] -> [T, channels]. Rings [slots, taps, channels]; targets that
    have seen fewer than taps - 1 tokens of the step take over inputs of the source."""
    back = torch.arange(w.taps - 1, 0, -1, device=x.device)
    before = s.num_computed[:, None] - back  # positions [N, taps - 1]; there are none below 0
    old = torch.where((before >= 0)[..., None], states[s.sources[:, None], before % w.taps], 0)
    inputs = torch.cat([old.flatten(0, 1), x])
    kept = (s.num_computed[:, None] + s.counts).flatten()[:, None] - back  # positions [N * W, taps - 1]
    states[s.targets[:, None], kept % w.taps] = inputs[s.last_inputs]
    return reduce(torch.add, (inputs[s.inputs[:, i]] * w.conv[:, i].float() for i in range(w.taps)))


def chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_rule` of n chunks of L tokens each: q [n, L, H, k_dim], state [n, H, k_dim, v_dim] -> (o, state). Where g
    and beta are 0 is no token."""
    q, k, v, g, beta = (one.transpose(1, 2) for one in (q, k, v, g, beta))  # [n, H, L, ..]
    total, beta = g.cumsum(2), beta[..., None]
    later = torch.ones(g.shape[2], g.shape[2], dtype=torch.bool, device=g.device).triu(1)
    decay = (total[..., None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()  # [n, H, L, L]
    from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    # The solver takes the diagonal as ones.
    system, right = beta * (k @ k.mT) * decay, torch.cat([beta * v, beta * from_start * k], -1)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1)
    new = u - w @ state
    o = from_start * (q @ state) + (q @ k.mT * decay) @ new
    return o.transpose(1, 2), from_start[..., -1:, :] * state + (to_end * k).mT @ new


class GatedDeltaNet(StateLayer):
    def make(self, config: model.ModelConfig, modules: model.Modules) -> None:
        c, m, s = config, modules, config.states
        channels, values = s["shapes"][0][1], s["v_heads"] * s["v_dim"]
        self.sizes = channels, values, s["v_heads"], s["v_heads"]
        apart = sum(c.parts.get("in_proj_ba", {}).values())  # rows of b and a; 0 unless the checkpoint is quantised
        self.in_proj = m.linear(c.hidden_size, sum(self.sizes) - apart, bias=False)  # q, k, v; z; b; a
        self.in_proj_ba = m.linear(c.hidden_size, apart, bias=False) if apart else None
        self.conv = Convolution(channels, s["length"], bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(s["v_heads"])) for _ in range(2))
        self.gated_norm = nn.Parameter(torch.empty(s["v_dim"]))
        self.out_proj = m.residual_linear(values, c.hidden_size, bias=False)

    def mix(self, x: Tensor, states: list[Tensor], slots: StateSlots) -> Tensor:
        s = self.config.states
        weights = Weights(self.conv.weight[:, 0], self.A_log, self.dt_bias, self.gated_norm, self.config.norm_eps,
                          s["k_heads"], s["v_heads"], s["k_dim"], s["v_dim"], s["length"])
        if self.in_proj_ba is None:
            qkv, z, b, a = self.in_proj(x).split(self.sizes, dim=1)
        else:
            qkv, z = self.in_proj(x).split(self.sizes[:2], dim=1)
            b, a = self.in_proj_ba(x).split(self.sizes[2:], dim=1)
        z = z.unflatten(1, (s["v_heads"], s["v_dim"]))
        mix_tokens = slots.kernels.gated_delta if slots.kernels else gated_delta
        return mix_tokens(qkv, z, b, a, weights, states, slots).flatten(1)


# --------------------------------------------------------------------------------------------------
# config.json
# --------------------------------------------------------------------------------------------------

NAMES = {"conv": "linear_attn.conv1d", "A_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias",
         "gated_norm": "linear_attn.norm.weight", "out_proj": "linear_attn.out_proj"}


def states_of(hf: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    """ModelConfig.states for these layers."""
    k_heads, v_heads, k_dim, v_dim, taps = (
        check_number(f"config.json: linear_{key}", hf.get(f"linear_{key}", default), *between(int, least, 2**12))
        for key, default, least in (("num_key_heads", 16, 1), ("num_value_heads", 32, 1), ("key_head_dim", 128, 1),
                                    ("value_head_dim", 128, 1), ("conv_kernel_dim", 4, 2)))
    if v_heads % k_heads:
        raise ValueError(f"config.json: {v_heads} value heads (linear_num_value_heads) cannot share {k_heads} key "
                         "heads evenly")
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    return dict(layers=layers, layer=GatedDeltaNet, kernels="delta_kernels", unit=CHUNK, length=taps, k_heads=k_heads,
                v_heads=v_heads, k_dim=k_dim, v_dim=v_dim, shapes=[(taps, channels), (v_heads, k_dim, v_dim)])
