"""The scales of an fp8 cache. They follow from a step that is tried when there is a pool (device/trial.py)."""
import math
from typing import Any

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.device.runner import Runner
from nanopaged.device.trial import trial_batch
from nanopaged.weights.build import memory_for

# An fp8 cache stores numbers up to 448; below 2^-6 they lose precision.
LARGEST_STORED = 64  # the largest K or V of the calibration text is stored as a number up to this one
SMALLEST_SCALED = 2.0**-20  # smaller maxima count as this one: a layer of zeros has a scale, too
CALIBRATION_TOKENS = 512


@memory_for("the step that finds the scales of an fp8 cache does not fit beside the weights and the pool; lower "
            "num_blocks, or leave out kv_cache_dtype")
def choose_scales(runner: Runner) -> list[tuple[float, float]]:
    """The scales of K and V of each layer: powers of two, from the K and V of a random text.

    The text's largest number is stored as at most LARGEST_STORED. Numbers of other texts may be 7 times as large before
    they are clipped, at 448, and 4,096 times smaller before they lose precision, below 2^-6.
    """
    c, device = runner.config, runner.device
    length = min(CALIBRATION_TOKENS, runner.max_model_len)
    num_blocks = engine.cdiv(length, runner.block_size)
    states = c.states.get("layers", ())  # these layers have no K and V
    caches: list[Any] = [
        (runner.pool.one_block(layer), None) if layer in states
        else torch.zeros(2, num_blocks, *runner.pool.shape_of(layer), dtype=runner.dtype, device=device)
        for layer in range(c.num_layers)]
    caches = [caches[layer] for layer in c.kv_sharing or range(c.num_layers)]
    ids = torch.randint(c.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = trial_batch(runner, [length], torch.zeros(0, dtype=torch.int64, device=device), length, ids)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    for one in (batch, *getattr(batch, "groups", ())):  # groups of layers (features/kinds)
        one.block_tables, one.slot_mapping = table, batch.slot_mapping
        # The kernel makes its own work list: its tile over this cache may be another one.
        one.metadata = batch.metadata._replace(query_tiles=None)
    runner.model(batch, [(*cache, 1.0, 1.0) for cache in caches], runner.kernels)
    scales = runner.agree([1.0 if layer in states else power_of_two_scale(values)
                           for layer, cache in enumerate(caches) for values in cache], largest=True)
    return list(zip(scales[::2], scales[1::2]))


def power_of_two_scale(values: Tensor) -> float:
    """The smallest power of two that divides all values to at most LARGEST_STORED. With broken weights, which give
    values that are not finite, it is 1; every request then ends with an error."""
    largest = values.abs().max().item()
    if not math.isfinite(largest):
        return 1.0
    return 2.0 ** math.ceil(math.log2(max(largest, SMALLEST_SCALED) / LARGEST_STORED))
