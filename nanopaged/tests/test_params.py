"""SamplingParams takes what an engine can use, and answers anything else with one sentence."""
import math
import subprocess
import sys
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import pytest

from nanopaged.params import SamplingParams

ROOT = Path(__file__).parents[2]
NO_INTEGER = ["1", "", b"1", 1.0, 1.5, math.nan, math.inf, -math.inf, 1j, True, False, [1], (1,), {}, object]
NO_NUMBER = ["0.5", "", b"1", math.nan, math.inf, -math.inf, 0.5j, True, False, [0.5], (), {}, object, None]
NO_IDS = [5, 0, 1.5, True, False, "", "12", b"12"]  # for stop_token_ids; the elements are tested apart
BAD = {
    "n": [*NO_INTEGER, None, 0, -1, -2**70],
    "temperature": [*NO_NUMBER, -1, -0.1, -1e-300, 1.1e6, 1e39, 10**400, -10**400],
    "top_p": [*NO_NUMBER, 0, 0.0, -0.0, -0.1, 1.0000001, 2, 100],
    "top_k": [*NO_INTEGER, None, -2, -2**70, 2**63, 2**70],
    "min_p": [*NO_NUMBER, -1e-300, -0.1, 1.0000001, 2],
    "seed": [*NO_INTEGER, 2**63, -2**63 - 1, 2**64],
    "max_tokens": [*NO_INTEGER, None, 0, -1, -2**70],
    "stop_token_ids": NO_IDS,
    "ignore_eos": [None, 0, 1, 1.0, math.nan, "yes", "", [], [True]],
}
GOOD = {
    "n": [1, 2, 1000],
    "temperature": [0, 0.0, -0.0, 1, 2, 1e-300, 1e-6, 100.0, 10**6, Fraction(1, 2)],
    "top_p": [1, 1.0, 0.5, 1e-300, math.nextafter(1, 0)],
    "top_k": [-1, 0, 1, 50, 10**9, 2**63 - 1],
    "min_p": [0, 0.0, 1, 1.0, 0.05, 1e-300],
    "seed": [None, 0, 1, -1, 2**63 - 1, -2**63],
    "max_tokens": [1, 16, 10**9],
    "stop_token_ids": [None, [], [0], [1, 2, 3], (4, 5), {6}, frozenset({7})],
    "ignore_eos": [True, False],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r:.30}") for name, values in table.items() for value in values]


def refusal(**settings) -> str:
    with pytest.raises(ValueError) as error:
        SamplingParams(**settings)
    message = str(error.value)
    assert "\n" not in message and ". " not in message and len(message) < 1000
    return message


def test_the_tables_name_every_field():
    assert set(BAD) == set(GOOD) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name, value", cases(BAD))
def test_a_wrong_value_is_refused_with_its_name(name, value):
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f", not {value!r}")


@pytest.mark.parametrize("value", ["1", 1.0, 1.5, math.nan, True, None, [1], -1, -2**70], ids=repr)
@pytest.mark.parametrize("before", [[], [0, 1]], ids=["first", "last"])
def test_a_wrong_stop_token_is_refused(before, value):
    message = refusal(stop_token_ids=[*before, value])
    assert message.startswith("stop_token_ids must be ") and message.endswith(f", not {value!r}")


@pytest.mark.parametrize("name, value", cases(GOOD))
def test_edge_values_pass_unchanged(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == value and type(kept) is type(value)


def test_stop_token_ids_that_can_be_read_only_once_are_refused():
    """The check would use a generator up, and the engine would then see none."""
    assert refusal(stop_token_ids=iter([1, 2])).startswith("stop_token_ids must be ")


def test_the_defaults_are_valid_and_those_of_the_design():
    assert SamplingParams() == SamplingParams(
        n=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, max_tokens=16, stop_token_ids=None, ignore_eos=False)


def test_settings_are_checked_together():
    assert refusal(temperature=0.8, top_p=0.9, top_k=40, min_p=2.0).startswith("min_p")


def test_an_unknown_setting_is_not_dropped_in_silence():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)


def test_settings_need_neither_torch_nor_numpy():
    code = ("import sys; from nanopaged import SamplingParams; SamplingParams(top_p=0.9); "
            "print(*sys.modules.keys() & {'torch', 'numpy', 'triton', 'tiktoken'})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
