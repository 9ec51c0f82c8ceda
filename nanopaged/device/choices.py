"""What is decided before the first step: device, types and kernels."""
import torch

from nanopaged import kernel
from nanopaged.device.pool import FP8
from nanopaged.inputs import check_choice, is_one_of
from nanopaged.optional_triton import triton


def pick_device(device: str) -> torch.device:
    if is_one_of(device, ("auto",)):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        picked = torch.device("meta")
    if picked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {device!r:.80}")
    if picked.type == "cuda":
        if not torch.cuda.is_available() or (picked.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA device(s)")
        picked = torch.device("cuda", picked.index if picked.index is not None else torch.cuda.current_device())
    return picked


def pick_devices(device: str, count: int, option: str = "data_parallel_size") -> list[torch.device]:
    """The device; with a count above 1 the first GPUs, or that many times the CPU. option: where the count is from."""
    first = pick_device(device)
    if count == 1 or first.type == "cpu":
        return [first] * count
    if str(device) not in ("auto", "cuda"):
        raise ValueError(f"{option} {count} takes the first {count} GPUs, so device must be 'auto' or "
                         f"'cuda', not {device!r}; CUDA_VISIBLE_DEVICES chooses others")
    if count > torch.cuda.device_count():
        raise ValueError(f"{option} is {count}, and torch sees {torch.cuda.device_count()} CUDA device(s)")
    return [torch.device("cuda", index) for index in range(count)]


def pick_dtype(dtype: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    dtype = str(dtype).removeprefix("torch.")
    dtype = {"half": "float16", "float": "float32"}.get(dtype, dtype)
    if dtype != "auto" and dtype not in names:
        raise ValueError(f"dtype must be 'auto', {', '.join(map(repr, names))}, not {dtype!r:.80}")
    if dtype != "auto":
        return names[dtype]
    if device.type == "cpu":
        return torch.float32
    if checkpoint_dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16  # cards before Ampere
    return checkpoint_dtype


def pick_kv_dtype(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device,
                  kernels: kernel.Kernels) -> torch.dtype:
    """The type of the cache's numbers: that of the model, or fp8."""
    if device.type == "cpu" and kernels.in_triton and (dtype is torch.bfloat16 or kv_cache_dtype != "auto"):
        raise ValueError("on a CPU the Triton kernel runs in Triton's interpreter, which computes bfloat16 and fp8 "
                         "wrongly; use attention='torch', or dtype 'float32' and kv_cache_dtype 'auto'")
    if kv_cache_dtype == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more (an RTX 4090, L4 or "
                         "H100); use 'auto'")
    return FP8


def pick_kernels(attention: str, device: torch.device) -> kernel.Kernels:
    check_choice("attention", attention, ("auto", "triton", "torch"))
    if attention == "torch" or attention == "auto" and (device.type != "cuda" or triton is None):
        return kernel.TORCH
    kernel.require_triton(device)
    return kernel.TRITON
