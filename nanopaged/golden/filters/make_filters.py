"""Which tokens transformers' filters keep of random logits, all filters after one another in vLLM's order.

    python nanopaged/golden/filters/make_filters.py        (a few seconds)

Needs the package `transformers` (written with 5.23). expected.json gets the `cases`, each with the `settings`, the
`logits` of a row, and `kept`: the ids of the tokens that TemperatureLogitsWarper, MinPLogitsWarper, TopKLogitsWarper
and TopPLogitsWarper leave, called in this order.

The logits are multiples of 1/4, so that several tokens are as good as the k-th. A row is made anew if rounding could
change what is kept of it, if a kept token is unlikely, or if top_p cuts between equal tokens: which of them stay is up
to the implementation.
"""
import itertools
import json
from pathlib import Path

import torch
import transformers
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

HERE = Path(__file__).parent
VOCAB_SIZE = 16
MARGIN = 1e-3  # of top_p and min_p: moved by so much they keep the same
SMALLEST = 0.01  # probability of a kept token
TEMPERATURES, TOP_KS, TOP_PS, MIN_PS = (0.7, 1.5), (0, 3, 6), (1.0, 0.5, 0.9), (0.0, 0.1)


def kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    warpers = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)]
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].isfinite().nonzero()[:, 0].tolist()


def make_case(seed: int, settings: dict) -> dict | None:
    logits = (torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 6).round() / 4
    tokens = kept(logits, **settings)
    for move in (-MARGIN, MARGIN):
        moved = settings | {name: settings[name] + move for name in ("top_p", "min_p") if 0 < settings[name] < 1}
        if kept(logits, **moved) != tokens:
            return None
    before_top_p = kept(logits, **settings | {"top_p": 1.0})
    cut = set(before_top_p) - set(tokens)
    probs = (logits[tokens] / settings["temperature"]).softmax(-1)
    if probs.min() < SMALLEST or cut and logits[list(cut)].max() == logits[tokens].min():
        return None
    return {"settings": settings, "logits": logits.tolist(), "kept": tokens}


def main():
    cases, seeds = [], itertools.count()
    for values in itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS):
        settings = dict(zip(("temperature", "top_k", "top_p", "min_p"), values))
        found = (make_case(seed, settings) for seed in seeds)
        cases += itertools.islice(filter(None, found), 2)
    text = ",\n".join(map(json.dumps, cases))
    (HERE / "expected.json").write_text(f'{{"transformers": "{transformers.__version__}", "cases": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
