"""What stands in for a GPU's parts on a CPU: the small kernels in torch, and the padding of recorded steps."""
import torch
import torch.nn.functional as F

import kernel
import model
from nanopaged.tests.helpers import if_there

experts, in_four_bits, fp8, fused, fused_experts, gemma4, gpt_oss, qwen3_5 = map(if_there, (
    "experts", "four_bits", "fp8", "fused", "fused_experts", "gemma4", "gpt_oss", "qwen3_5"))


def normalize(x, weight, bias, eps):
    return kernel.rms_norm(x, weight, eps) if bias is None else F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def fp8_weight(weight, scale):
    """A weight in FP8, as an engine keeps it, in float32."""
    return weight.float() * scale


def activate(x, activation):
    return gpt_oss.clamped_swiglu(x) if activation == "swigluoai" else model.activate(x, activation, True)


class PlainKernels:
    """The plain forms of the kernels of fused.py and others, for engines on a CPU: the interpreter is slow."""
    activate, quantize_rows = staticmethod(model.activate), staticmethod(fp8.quantize if fp8 else None)

    @staticmethod
    def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum=False):
        """torch._scaled_mm, and what it demands on a GPU. On a CPU not every torch has scales for rows."""
        (rows, size), columns = a.shape, b.shape[1]
        assert a.dtype is b.dtype is torch.float8_e4m3fn and size % 16 == columns % 16 == 0
        assert a.is_contiguous() and b.T.is_contiguous() and scale_a.dtype is scale_b.dtype is torch.float32
        assert scale_a.shape == (rows, 1) and scale_b.shape == (1, columns)
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    @staticmethod
    def fused_add_norm(x, residual, weight, bias, eps):
        for part in x if isinstance(x, tuple) else (x,):
            for one in part if part.dim() == 3 else [part]:
                residual = residual + one
        return normalize(residual, weight, bias, eps), residual

    @staticmethod
    def add_norms(x, post, residual, scalar, weight, eps):
        x = x.sum(0) if x.dim() == 3 else x
        total = (residual + kernel.rms_norm(x, post, eps)) * (1 if scalar is None else scalar)
        return kernel.rms_norm(total, weight, eps), total

    @staticmethod
    def few_rows_linear(x, weight, bias, out=None, activation="", gated=False, count=1, scale=None, form=None):
        if scale is not None:
            weight = fp8_weight(weight, scale).to(x.dtype)
            x = x if len(x) <= fused.MOST_16_BIT_ROWS else fp8_weight(*fp8.quantize(x)).to(x.dtype)
        y = F.linear(x, weight, bias) if count == 1 else fused.partial_products(x, weight, count)
        if count > 1 and bias is not None:
            y[0] += bias
        y = model.activate(y, activation, gated) if activation else y
        return y if out is None else out.copy_(y)

    @staticmethod
    def gate_output(o, gate):
        return o * gate.sigmoid()

    @staticmethod
    def mix_experts(x, logits, gate_up, down, top_k, normalized, activation, *scales, biases=(), has_shared=False,
                    sigmoid=0.0, expert_bias=None, expert_scale=None, four_bits=None, counts=None):
        if four_bits:
            sizes = x.shape[1], gate_up.shape[1] // 2
            gate_up, down = (widen_words(*one) for one in zip((gate_up, down), *zip(*scales), sizes))
        elif scales:
            gate_up, down = map(fp8_weight, (gate_up, down), scales)
        logits = logits.float() if logits.dim() == 2 else logits.float().sum(0)
        count = len(gate_up) - has_shared
        scores, chosen = experts.choose_experts(logits[:, :count], top_k, normalized, sigmoid, expert_bias,
                                                expert_scale)
        if has_shared:
            scores = torch.cat([scores, logits[:, count:count + 1].sigmoid()], 1)
            chosen = F.pad(chosen, (0, 1), value=count)
        hidden = torch.einsum("tnij,tj->tni", gate_up[chosen].to(x.dtype), x)
        hidden = activate(hidden + biases[0][chosen] if biases else hidden, activation)
        out = torch.einsum("tnji,tni->ntj", down[chosen].to(x.dtype), hidden)
        out = out + biases[1][chosen].transpose(0, 1) if biases else out
        return (out * scores.T[:, :, None]).to(x.dtype)


def widen_words(weight, scale, zero=None, row_scale=None, size=None):
    """`four_bit_codes.widen` in plain torch, in float32."""
    if weight.dtype is torch.float8_e4m3fn:  # block, word, number, half
        codes = weight.view(torch.uint8).unflatten(-1, (-1, 4, 2, 2)).movedim(-1, -3).flatten(-4)[..., :size]
        return in_four_bits.widen(codes.view(weight.dtype), scale)
    shifts = torch.arange(0, 16, 4, device=weight.device)[:, None, None] + torch.tensor([0, 16], device=weight.device)
    words = weight.view(torch.int32).unflatten(-1, (-1, 1, 4, 1))  # block, pair, word, half
    codes = words >> shifts & 15
    if scale.itemsize == 1:  # e2m1
        d = words << 2 & ~0x01000100 | words >> 6 & 0x01000100
        pairs = torch.cat([words, words >> 4 & 0x0FFFFFFF | words << 28, words << 6, d], -3)
        pairs = pairs >> torch.tensor([0, 16], device=weight.device)
        codes = pairs >> 12 & 8 | pairs >> 6 & 7
    return in_four_bits.widen(in_four_bits.pack(codes.byte().flatten(-4)[..., :size]), scale, zero, row_scale)


def plain_kernels():
    """(object, name, what to put there), for a process on a CPU that has fused modules or a GraphRunner."""
    homes = dict(activate=fused, fused_add_norm=fused, few_rows_linear=fused, quantize_rows=fp8,
                 mix_experts=fused_experts, gate_output=qwen3_5, add_norms=gemma4)
    return [*((home, name, getattr(PlainKernels, name)) for name, home in homes.items() if home),
            (torch, "_scaled_mm", PlainKernels.scaled_mm)]


def blank_input(runner, shape):
    """A pretended graph computes what it records: a step of padding."""
    for part, filler in zip(runner.graph_input[:sum(shape.layout)].split(shape.layout),
                            [0, 0, -1, 0, 0, runner.max_num_seqs, *[0] * (2 if shape.num_entries else 0), -1]):
        part.fill_(filler)


def kept(llm):
    """Weights in FP8, in float32, by our names."""
    tensors = dict(llm.runner.model.named_parameters())
    return {name: fp8_weight(tensor, tensors[name.replace("weight", "scale")]) for name, tensor in tensors.items()
            if tensor.dtype is torch.float8_e4m3fn}


class PretendedGraph:
    """A stand-in for a CUDA graph on a CPU: it does again what was done while it was recorded."""
    recording = None

    def __init__(self):
        self.steps = []

    def pool(self):
        pass

    def replay(self):
        for step, outputs in self.steps:
            for output, new in zip(outputs, step(), strict=True):
                output.copy_(new)

    def capture_begin(self, *_, **__):
        PretendedGraph.recording = self

    def capture_end(self):
        PretendedGraph.recording = None


def pretend_to_record(step):
    """The step of a runner, or of masks, that a pretended graph can do again."""
    def record(*args):
        graph = PretendedGraph.recording
        if graph and hasattr(args[-1], "num_tiles"):
            blank_input(*args)
        outputs = step(*args)
        if graph:
            graph.steps.append((lambda: step(*args), outputs))
        return outputs
    return record
