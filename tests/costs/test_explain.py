"""The explanation: textbook formulas with their numbers, in both languages."""

import re
from fractions import Fraction
from typing import Any

import pytest

import headwise as hw
from headwise.costs.cost import FIGURES
from headwise.costs.formula import size
from headwise.costs.words import LETTERS, translated_part
from tests.costs.families import CONFIGS
from tests.costs.modules import CASES, B
from tests.thinned import thinned

GPT2 = {"model_type": "gpt2"}
NUMBER = r"[\d,]+"


def test_the_formulas_of_the_textbooks() -> None:
    text = hw.cost(GPT2, batch=2, queries=1024, fused=False).explain()
    for formula in (
        "4h² + 4h",
        "12h² + 13h = 12·768² + 13·768 = 7,087,872",
        "24bsh² + 4bPh",
        "2bshV",
        "4blsh = 4·2·12·1,024·768 = 75,497,472",
        "s(s+1)/2 = 524,800",
    ):
        assert formula in text, formula


def test_a_layer_without_a_mask_has_the_square() -> None:
    block = hw.nn.Block(64, hw.nn.MultiHeadAttention(64, 4), hw.nn.GELU(256).build(64))
    text = hw.cost(block, batch=2, queries=128).explain()
    assert "24bsh² + 4bs²h = 24·2·128·64² + 4·2·128²·64 = 33,554,432" in text


def test_every_line_computes_what_it_says() -> None:
    """Put back into Python, each formula gives the number behind it."""
    for fields in (GPT2, {"model_type": "gemma2"}, {"model_type": "deepseek_v3"}):
        text = hw.cost(fields, batch=2, queries=100).explain()
        found = re.findall(rf"= ([^=\n]*[·²][^=\n]*) = ({NUMBER})$", text, re.MULTILINE)
        assert len(found) > 10
        for written, value in found:
            python = written.replace(",", "").replace("·", "*").replace("²", "**2")
            assert eval(python) == int(value.replace(",", "")), written


@pytest.mark.parametrize("name", thinned([*CONFIGS, *CASES]))
def test_everything_is_explained_in_both_languages(name: str) -> None:
    if name in CONFIGS:
        pytest.importorskip("transformers")
        kind, fields = CONFIGS[name]
        cost = hw.cost({"model_type": kind, **fields}, queries=None if kind == "vit" else 64)
    else:
        cost = hw.cost(CASES[name].build(), batch=B, **CASES[name].sizes)
    english, chinese = cost.explain(), cost.explain("zh")
    large = r"\d+(?:,\d{3})+"
    assert sorted(re.findall(large, english)) == sorted(re.findall(large, chinese))
    assert english != chinese
    for part in () if name in CONFIGS else set(_names(cost)):  # modules are called as they are
        assert re.search("[一-鿿]", translated_part(part)) or part.isdigit(), part
    letters = {symbol.name for line in _lines(cost) for symbol in line.formula.symbols}
    assert letters <= set(LETTERS)


def _names(cost: hw.Cost) -> Any:
    for name, part in cost.parts.items():
        yield name
        yield from _names(part)


def _lines(cost: hw.Cost) -> Any:
    yield from cost.lines
    for part in cost.parts.values():
        yield from _lines(part)


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="language='fr'"):
        hw.cost(GPT2).explain("fr")  # type: ignore[arg-type]


def test_printing_a_cost_explains_it() -> None:
    cost = hw.cost(hw.nn.MultiHeadAttention(64, 4), queries=8)
    assert str(cost) == cost.explain()
    assert "params=16640" in repr(cost)


def test_a_cost_is_ready_for_json() -> None:
    import json

    written = json.loads(json.dumps(hw.cost(GPT2, queries=64).to_dict()))
    assert set(FIGURES) <= set(written)
    assert written["params"] == sum(part["params"] for part in written["parts"].values())


def test_ranks_are_named() -> None:
    text = hw.cost({"model_type": "llama"}, batch=4, queries=64, mesh={"tp": 4, "dp": 2})
    assert "one rank of dp=2, tp=4" in text.explain()
    assert "dp=2, tp=4 中的一个进程" in text.explain("zh")


def test_formulas_are_exact_sums_of_products() -> None:
    a, b = size("a", 3), size("b", 5)
    both = (a + b) * (a - b) + 2 * b * b
    assert (str(both), both.value) == ("b² + a²", 34)
    with pytest.raises(ValueError, match="not a whole number"):
        _ = (a * b * Fraction(1, 2)).value
