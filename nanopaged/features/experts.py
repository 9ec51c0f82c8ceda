"""Mixtures of experts: an MLP that consists of many small ones, of which each token takes a few. (Shazeer et al. 2017)

    scores = softmax(router(x))                                    a number for each expert; in LFM2 a sigmoid
    x = x + sum of score[i] * expert[i](x) over the experts i with the top_k largest scores

In Qwen3-30B-A3B a layer has 128 experts, and a token takes 8: of 30B weights it is multiplied by 3B. A step reads the
weights of all experts that any of its tokens takes. One token reads 8 of a layer, 8 tokens read about 52, and 64 tokens
read 126 if they choose evenly. Decode therefore gains less from batching than in a dense model until all are read.

`Experts` is the plain form, a loop over the experts. fused_experts.py computes the same on a GPU in three launches.
"""
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged import model
from nanopaged.inputs import between, check_number
from nanopaged.options import feature
from nanopaged.weights import families

SMALLEST_SUM = 1e-6  # is added to a sum of sigmoids, which may be 0


class Experts(nn.Module):
    """The MLP of a layer: [T, D] -> [T, D]. Each expert is an MLP, and all experts' matrices are in one tensor."""
    router_class: Callable[..., model.Linear] = model.Linear

    def __init__(self, dense: Callable[..., nn.Module], config: model.ModelConfig, index: int,
                 modules: model.Modules) -> None:
        """dense: the class of an expert"""
        super().__init__()
        self.settings, self.activation = config.experts, config.experts.get("activation", config.activation)

        def mlp(size: int) -> nn.Module:
            return dense(replace(config, intermediate_size=size), index, modules)

        self.router = self.router_class(config.hidden_size, self.settings["count"] + self.settings["gate_rows"],
                                        bias=config.mlp_bias)
        self.experts: Any = nn.ModuleList(mlp(self.settings["size"]) for _ in range(self.settings["count"]))
        self.shared = mlp(self.settings["shared_size"]) if self.settings["shared_size"] else None
        # Is added to the scores for the choice alone.
        self.expert_bias = nn.Parameter(torch.empty(self.settings["count"])) if self.settings["has_bias"] else None
        # Multiplies the scores of the experts that were chosen (Gemma 4).
        has_scale = self.settings.get("has_scale", False)
        self.expert_scale = nn.Parameter(torch.empty(self.settings["count"])) if has_scale else None
        # "gate_up_proj.weight" -> that of all experts, [count, rows, columns]. A shared one with a score, if it is as
        # large as the others, in the same form, is the last: to the kernels it is an expert that every token chooses.
        self.whole: dict[str, Tensor] = {}
        one, shared = ([getattr(module, "form", None) for module in mlp.modules()] if mlp else None
                       for mlp in (self.experts[0], self.shared))
        self.joins_shared = bool(self.settings["gate_rows"]) and one == shared and (
            self.settings["size"] == self.settings["shared_size"])

    def forward(self, x: Tensor, for_router: Tensor | None = None) -> Tensor:
        """for_router: what the router reads, if that is not x"""
        logits = self.router(x if for_router is None else for_router).float()
        scores, chosen = self.choose(logits[:, :self.settings["count"]])
        out = torch.zeros_like(x, dtype=torch.float32) if self.shared is None else self.run_shared(x, logits).float()
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if len(token):
                out[token] += scores[token, place, None] * expert(x[token])
        return out.to(x.dtype)

    def run_shared(self, x: Tensor, logits: Tensor) -> Tensor:
        """The result of the expert that every token has, times a score if there is one."""
        y, count = self.shared(x), self.settings["count"]
        return y * logits[:, count:count + 1].sigmoid() if self.settings["gate_rows"] else y

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of each token's experts, and the experts: [T, top_k] each."""
        e = self.settings
        return choose_experts(logits, e["top_k"], e["normalized"], e["sigmoid"], self.expert_bias,
                              self.expert_scale)

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> "Experts":
        """`build_model` gives parameters their memory with this method of modules. The experts' become views."""
        for module in filter(None, (self.router, self.shared)):
            module._apply(function)
        for name in ("expert_bias", "expert_scale"):
            if (one := getattr(self, name)) is not None:
                setattr(self, name, nn.Parameter(function(one), requires_grad=False))
        experts = [*self.experts, *[self.shared] * self.joins_shared]
        for name, first in self.experts[0].named_parameters():
            one, (module, kind) = function(first), name.split(".")
            self.whole[name] = one.new_empty(len(experts), *one.shape)
            for expert, part in zip(experts, self.whole[name]):
                setattr(expert.get_submodule(module), kind, nn.Parameter(part, requires_grad=False))
        return self


def choose_experts(logits: Tensor, top_k: int, normalized: bool, sigmoid: float = 0.0,
                   bias: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token takes the experts with the largest scores + bias: their scores, and their numbers, [T, top_k] each.
    logits [T, E] float32; sigmoid: 0 for a softmax, or the factor of scores that are sigmoids; bias [E]; scale [E]:
    multiplies the scores in the end"""
    scores = logits.sigmoid() if sigmoid else F.softmax(logits, dim=1)
    chosen = (scores if bias is None else scores + bias).topk(top_k).indices
    scores = scores.gather(1, chosen)
    if normalized:
        scores = scores / (scores.sum(1, keepdim=True) + (SMALLEST_SUM if sigmoid else 0.0))
    return scores * (sigmoid or 1.0) * (1.0 if scale is None else scale[chosen]), chosen


def with_experts(modules: model.Modules) -> model.Modules:
    """The modules for a mixture of experts, made of those for a dense model."""
    dense, mixture = modules.mlp, Experts
    if modules.norm is not model.PLAIN.norm:  # features/fused.py; its steps are recorded, and the loop cannot be
        fused_experts = feature("fused_experts", "a mixture of experts on a GPU, but with enforce_eager,")
        mixture = partial(fused_experts.FusedExperts, fused_experts.Counts())

    def make_mlp(config: model.ModelConfig, index: int, modules: model.Modules) -> nn.Module:
        make = dense if index in config.experts["dense_layers"] else partial(mixture, dense)
        return make(config, index, modules)

    return modules._replace(mlp=make_mlp)


# --------------------------------------------------------------------------------------------------
# The families
# --------------------------------------------------------------------------------------------------

def mixture(hf: dict[str, Any], count: str, size: str, normalized: bool, dense_layers: Sequence[int] = (),
            shared_size: int = 0, gate_rows: int = 0, sigmoid: float = 0.0, has_bias: bool = False) -> dict[str, Any]:
    """ModelConfig.experts: how many there are, of how many a token takes the results (top_k), the intermediate size of
    each, whether a token's scores are made to add up to 1, the layers whose MLP is dense, and the intermediate size of
    an expert that every token has (0: none); sigmoid and the bias of `choose_experts`. gate_rows: of the router, behind
    those of experts: the first computes a score for the expert that every token has. count, size: keys of config.json;
    transformers 5 writes either count"""
    count = next((key for key in (count, "num_experts", "num_local_experts") if hf.get(key) is not None), count)
    for key, most in ((count, 4096), (size, families.MOST["intermediate_size"]), ("num_experts_per_tok", hf[count])):
        check_number(f"config.json: {key}", hf[key], *between(int, 1, most))
    return dict(count=hf[count], top_k=hf["num_experts_per_tok"], size=hf[size], normalized=bool(normalized),
                dense_layers=dense_layers, gate_rows=gate_rows, sigmoid=sigmoid, has_bias=has_bias,
                shared_size=shared_size and families.check_size("intermediate_size", shared_size))


def merged_experts(config: model.ModelConfig) -> dict[str, dict[str, int]]:
    """ModelConfig.merged for the two tensors of transformers 5 that have the matrices of all experts of a layer."""
    mlp, size = config.names.get("mlp", "mlp"), config.experts["size"]
    gate, up, down = (f"{mlp}.experts.{{}}.{config.names.get(name, name)}"
                      for name in ("gate_proj", "up_proj", "down_proj"))
    return {f"{place}.experts.{name}": rows for place in ("mlp", mlp) for name, rows in (
        ("gate_up_proj", {gate: size, up: size}), ("down_proj", {down: config.hidden_size}))}


def mixtral(hf: dict[str, Any]) -> model.ModelConfig:
    hf = {"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5} | hf
    config = families.mistral(hf)
    config.names = families.NAMES | {"mlp": "block_sparse_moe", "router": "gate", "gate_proj": "w1", "up_proj": "w3",
                            "down_proj": "w2"}
    config.experts = mixture(hf, "num_local_experts", "intermediate_size", True)
    config.merged = merged_experts(config) | {"mlp.gate": {"block_sparse_moe.gate": config.experts["count"]}}
    return config


def qwen3_moe(hf: dict[str, Any]) -> model.ModelConfig:
    hf = {"num_key_value_heads": 4, "sliding_window": 4096} | hf
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    layers = range(families.check_size("num_layers", hf["num_hidden_layers"]))
    experts = mixture(hf, "num_experts", "moe_intermediate_size", hf.get("norm_topk_prob", False),
                      [i for i in layers if i in dense or (i + 1) % step])
    windows = families.optional_windows(hf)
    config = families.llama(hf, qk_norm=True, mlp_bias=False, sliding_windows=windows,
                            names=families.NAMES | {"router": "gate"}, experts=experts)
    config.merged = merged_experts(config)
    return config


def olmoe(hf: dict[str, Any]) -> model.ModelConfig:
    families.require("OLMoE", hf, dict(clip_qkv=None))
    experts = mixture(hf, "num_experts", "intermediate_size", hf.get("norm_topk_prob", False))
    config = families.llama({"rms_norm_eps": 1e-5} | hf, all_heads_norm=True, mlp_bias=False,
                            names=families.NAMES | {"router": "gate"}, experts=experts)
    config.merged = merged_experts(config)
    return config


def granite_moe(hf: dict[str, Any]) -> model.ModelConfig:
    """Its softmax goes over the chosen experts only: the same numbers as of one over all, divided by their sum. The
    matrices of all experts are stored as one tensor."""
    config, size, shared_size = families.granite(hf), hf["intermediate_size"], hf.get("shared_intermediate_size", 0)
    config.names = families.NAMES | {"mlp": "block_sparse_moe", "router": "router.layer"}
    config.experts = mixture(hf, "num_local_experts", "intermediate_size", True, shared_size=shared_size)
    shared, router = "block_sparse_moe.shared.", "block_sparse_moe.router"
    config.merged = merged_experts(config) | {
        "shared_mlp.input_linear": {f"{shared}gate_proj": shared_size, f"{shared}up_proj": shared_size},
        "shared_mlp.output_linear": {f"{shared}down_proj": config.hidden_size},
        "input_linear": {"experts.{}.gate_proj": size, "experts.{}.up_proj": size},
        "output_linear": {"experts.{}.down_proj": config.hidden_size},
        router: {f"{router}.layer": config.experts["count"]}}
    return config
