"""What is decided before the first step: device, types and kernels, and the scales of an fp8 cache."""
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nanopaged import engine, kernel, model
from nanopaged.inputs import check_choice, is_one_of

FP8 = torch.float8_e4m3fn
# For `choose_scales`. An fp8 cache stores numbers up to 448; below 2^-6 they lose precision.
LARGEST_STORED = 64  # the largest K or V of the calibration text is stored as a number up to this one
SMALLEST_SCALED = 2.0**-20  # smaller maxima count as this one: a layer of zeros has a scale, too
CALIBRATION_TOKENS = 512


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
    if device.type == "cpu" and kernels is kernel.TRITON and (dtype is torch.bfloat16 or kv_cache_dtype != "auto"):
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
    if attention == "torch" or attention == "auto" and (device.type != "cuda" or kernel.triton is None):
        return kernel.TORCH
    kernel.require_triton(device)
    return kernel.TRITON


# --------------------------------------------------------------------------------------------------
# The scales of an fp8 cache
# --------------------------------------------------------------------------------------------------

@torch.inference_mode()
def choose_scales(compute: Callable[[list[int], Tensor, list[tuple]], object], config: model.ModelConfig,
                  block_shape: tuple[int, int, int], max_model_len: int, dtype: torch.dtype,
                  device: torch.device) -> list[tuple[float, float]]:
    """The scales of K and V of each layer, powers of two, from the K and V of a random text.

    The text's largest number is stored as at most LARGEST_STORED. Other texts then have a factor of 7 up to 448, where
    numbers are clipped, and 2^12 down to 2^-6, where they lose precision. compute(token ids, block table, cache)
    computes a text.
    """
    length = min(CALIBRATION_TOKENS, max_model_len)
    num_blocks = engine.cdiv(length, block_shape[0])
    cache = [torch.zeros(2, num_blocks, *block_shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
    ids = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    compute(ids, torch.arange(num_blocks, dtype=torch.int32, device=device)[None], [(k, v, 1.0, 1.0) for k, v in cache])
    return [(power_of_two_scale(k), power_of_two_scale(v)) for k, v in cache]


def power_of_two_scale(values: Tensor) -> float:
    """The smallest power of two that divides all values to at most LARGEST_STORED. With broken weights, which give
    values that are not finite, it is 1; every request then ends with an error."""
    largest = values.abs().max().item()
    if not math.isfinite(largest):
        return 1.0
    return 2.0 ** math.ceil(math.log2(max(largest, SMALLEST_SCALED) / LARGEST_STORED))
