"""Mamba 2 (Dao and Gu 2024): state-space layers in place of attention, as in Granite 4 H.

A head has a state h of [head_dim, state_size]. Each token brings x [head_dim], B and C [state_size], which come out of
a short convolution, and a number dt:

    h = exp(-exp(A_log) * dt) * h + dt * x * B        y = h C + D x

A layer keeps two states: the convolution's inputs, and h of all heads. A sequence with one new token takes that step.
The tokens of a prompt are computed in chunks, as matrix products: token l of a chunk reads token m of it through
(C_l B_m), times the decay between them, and all tokens before the chunk through h. Where a chunk ends changes the last
bits, so chunks end at multiples of CHUNK positions, however a prompt is cut into steps.
"""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged import model
from nanopaged.features.kinds.chunks import scan
from nanopaged.features.kinds.recurrent import Convolution, StateLayer, StateSlots, convolve
from nanopaged.inputs import between, check_number

CHUNK = 64


class Mamba(StateLayer):
    def make(self, config: model.ModelConfig, modules: model.Modules) -> None:
        c, m, s = config, modules, config.states
        inner, mixed = s["heads"] * s["head_dim"], s["shapes"][0][1]
        self.in_proj = m.linear(c.hidden_size, inner + mixed + s["heads"], bias=s["bias"])
        self.conv = Convolution(mixed, s["length"], s["conv_bias"])
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(s["heads"])) for _ in range(3))
        self.gated_norm = model.Norm(c, inner)
        self.out_proj = m.residual_linear(inner, c.hidden_size, bias=s["bias"])

    def mix(self, x: Tensor, states: list[Tensor], slots: StateSlots) -> Tensor:
        s = self.config.states
        heads, groups, size = s["heads"], s["groups"], s["state_size"]
        inner = heads * s["head_dim"]
        gate, mixed, dt = self.in_proj(x).split([inner, inner + 2 * groups * size, heads], dim=1)
        mixed = F.silu(convolve(mixed, self.conv.weight, self.conv.bias, states[0], slots)).float()
        u, b, c = mixed.split([inner, groups * size, groups * size], dim=1)
        u = u.unflatten(1, (heads, -1))  # [T, H, head_dim]
        b, c = (part.unflatten(1, (groups, size)).repeat_interleave(heads // groups, 1) for part in (b, c))
        dt = F.softplus(dt.float() + self.dt_bias.float()).clamp(*s["dt_limit"])  # [T, H]
        y = scan(step, chunk, (u, b, c), (dt, -self.A_log.float().exp() * dt), states[1], slots)
        y = y + self.D.float()[:, None] * u
        y = (y.flatten(1) * F.silu(gate.float())).unflatten(1, (groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=s["norm_eps"]).flatten(1)
        return self.gated_norm.weight * y.to(x.dtype)


def step(u: Tensor, b: Tensor, c: Tensor, dt: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """h = exp(a) * h + dt * u * b, y = h c, of one token of each of N texts: u [N, H, head_dim], b and c [N, H, size],
    dt and a [N, H], h [N, H, head_dim, size] -> (y, h)"""
    h = a.exp()[..., None, None] * h + (dt[..., None] * u)[..., None] * b[:, :, None]
    return torch.einsum("nhps,nhs->nhp", h, c), h


def chunk(u: Tensor, b: Tensor, c: Tensor, dt: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """`step` of n chunks of L tokens each: u [n, L, H, head_dim], h [n, H, head_dim, size] -> (y, h). Where dt and a
    are 0 is no token."""
    total = a.cumsum(1)  # [n, L, H]
    later = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=a.device).triu(1)[..., None]
    decay = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()  # [n, L, L, H]
    weights = torch.einsum("nlhs,nmhs->nlmh", c, b) * decay * dt[:, None]
    y = torch.einsum("nlmh,nmhp->nlhp", weights, u) + torch.einsum("nlhs,nhps->nlhp", c, h) * total.exp()[..., None]
    left = (total[:, -1:] - total).exp() * dt
    new = torch.einsum("nlhp,nlhs->nhps", left[..., None] * u, b)
    return y, total[:, -1].exp()[..., None, None] * h + new


def add_states(config: model.ModelConfig, hf: dict[str, Any], kinds: list[str]) -> None:
    """Granite 4 H: the layers that are not of attention."""
    if len(kinds) != config.num_layers or not {*kinds} <= {"attention", "full_attention", "mamba", "linear_attention"}:
        raise ValueError(f"config.json: layer_types must say of each of the {config.num_layers} layers whether it is "
                         f"'mamba' or 'attention', not {kinds!r:.80}")
    if {*kinds} <= {"mamba", "linear_attention"}:
        raise ValueError("config.json: layer_types has no layer with attention, and nanopaged needs one")
    heads, groups, size, length = (
        check_number(f"config.json: mamba_{key}", hf.get(f"mamba_{key}", default), *between(int, least, 2**16))
        for key, default, least in (("n_heads", 128, 1), ("n_groups", 1, 1), ("d_state", 256, 1), ("d_conv", 4, 2)))
    inner = hf.get("mamba_expand", 2) * config.hidden_size
    if inner % heads or heads % groups:
        raise ValueError(f"config.json: {heads} state-space heads cannot share {inner} numbers, and {groups} groups, "
                         "evenly")
    mixed = inner + 2 * groups * size
    config.names = config.names | {
        "in_proj": "mamba.in_proj", "conv": "mamba.conv1d", "dt_bias": "mamba.dt_bias", "A_log": "mamba.A_log",
        "D": "mamba.D", "gated_norm": "mamba.norm", "out_proj": "mamba.out_proj"}
    config.states = dict(
        layers=[i for i, kind in enumerate(kinds) if "attention" != kind != "full_attention"], layer=Mamba, unit=CHUNK,
        length=length, shapes=[(length - 1, mixed), (heads, inner // heads, size)], heads=heads,
        head_dim=inner // heads, groups=groups, state_size=size, bias=hf.get("mamba_proj_bias", False),
        conv_bias=hf.get("mamba_conv_bias", True), norm_eps=hf.get("rms_norm_eps", 1e-6),
        dt_limit=hf.get("time_step_limit") or (0.0, torch.inf))
