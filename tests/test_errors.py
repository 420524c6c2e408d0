"""Bad input gets a ValueError that restates the call: its shapes, the option, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from tests import garbage

q = torch.randn(2, 4, 5, 8)
k = torch.randn(2, 2, 6, 8)
v = torch.randn(2, 2, 6, 8)
CALLS: dict[str, Callable[..., object]] = {
    "attention": hw.attention,
    "observe": hw.observe,
    "explain": hw.explain,
    "partial": hw.partial,
}

TENSORS: dict[str, tuple[Tensor, Tensor, Tensor, str]] = {
    "two axes": (q[0, 0], k[0, 0], v[0, 0], "need the axes"),
    "five axes": (q[None], k[None], v[None], "need the axes"),
    "mixed axes": (q, k[0], v[0], "need the axes"),
    "batch sizes": (q[:1], k, v, "batch sizes differ: q 1, k 2, v 2"),
    "head counts": (q[:, :3], k, v, "3 query heads are not a multiple of 2 key heads"),
    "no key heads": (q, k[:, :0], v[:, :0], "not a multiple of 0 key heads"),
    "heads of k and v": (q, k, v[:, :1], "k has 2 heads and 6 keys, v 1 heads and 6 keys"),
    "lengths of k and v": (q, k, v[:, :, :4], "k has 2 heads and 6 keys, v 2 heads and 4 keys"),
    "widths": (q[..., :5], k, v, "queries have width 5 and keys 8"),
    "dtypes": (q, k.double(), v, "different dtypes: torch.float32, torch.float64, torch.float32"),
    "integers": (q.long(), k.long(), v.long(), "torch.int64 is not supported"),
    "complex": (q.cfloat(), k.cfloat(), v.cfloat(), "torch.complex64 is not supported"),
    "devices": (q, k.to("meta"), v, "different devices: cpu, meta, cpu"),
    "no width": (q[..., :0], k[..., :0], v, "width"),
}

OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "mask is a tensor": (
        {"mask": torch.ones(5, 6, dtype=torch.bool)},
        "hw.mask.dense(bool_tensor)",
    ),
    "mask is a word": ({"mask": "causal"}, "hw.mask.causal()"),
    "mask of another length": (
        {"mask": hw.mask.dense(torch.ones(5, 7, dtype=torch.bool))},
        "(5, 7), which does not broadcast to (batch, query heads, queries, keys) = (2, 4, 5, 6)",
    ),
    "mask of key heads": (
        {"mask": hw.mask.dense(torch.ones(2, 2, 5, 6, dtype=torch.bool))},
        "(2, 2, 5, 6), which does not broadcast",
    ),
    "mask of five axes": (
        {"mask": hw.mask.dense(torch.ones(1, 1, 1, 5, 6, dtype=torch.bool))},
        "(1, 1, 1, 5, 6), which does not broadcast",
    ),
    "lengths of another batch": ({"mask": hw.mask.lengths([1, 2, 3])}, "2 batch entries"),
    "offsets of another batch": ({"mask": hw.mask.causal([1, 2, 3])}, "2 batch entries"),
    "window offsets": ({"mask": hw.mask.window(1, 0, [1, 2, 3])}, "2 batch entries"),
    "prefix of another batch": ({"mask": hw.mask.prefix([1, 2, 3])}, "prefix(n) has shape (3,)"),
    "documents of another length": (
        {"mask": hw.mask.documents(torch.zeros(2, 5))},
        "(batch or 1, keys) = (2, 6)",
    ),
    "documents of another batch": ({"mask": hw.mask.documents(torch.zeros(3, 6))}, "(2, 6)"),
    "bounds of another length": (
        {"mask": hw.mask.between(torch.arange(6), torch.arange(1, 7))},
        "(batch, heads, queries) = (2, 4, 5)",
    ),
    "a bad mask inside a good one": (
        {"mask": hw.mask.causal() & (hw.mask.window(1) | hw.mask.lengths([1, 2, 3]))},
        "2 batch entries",
    ),
    "bias of another length": ({"bias": torch.zeros(7, 6)}, "(7, 6), which does not broadcast"),
    "boolean bias": ({"bias": torch.ones(5, 6, dtype=torch.bool)}, "mask=hw.mask.dense(...)"),
    "bias is a number": ({"bias": 3.0}, "not a tensor, hw.ALiBi or hw.RelativeBuckets"),
    "slopes": ({"bias": hw.ALiBi(3)}, "slopes (3,); this call needs (4,)"),
    "table": ({"bias": hw.RelativeBuckets(torch.zeros(8, 3))}, "this call needs (buckets, 4)"),
    "flat table": ({"bias": hw.RelativeBuckets(torch.zeros(8))}, "this call needs (buckets, 4)"),
    "no softcap": ({"softcap": 0.0}, "softcap=0.0 must be positive"),
    "negative softcap": ({"softcap": -2.0}, "softcap=-2.0 must be positive"),
    "softcap is not a number": ({"softcap": float("nan")}, "softcap=nan must be positive"),
    "endless softcap": ({"softcap": float("inf")}, "softcap=inf must be positive and finite"),
    "softcap for each head": ({"softcap": torch.ones(4)}, "must be positive and finite"),
    "sinks of key heads": ({"sinks": torch.zeros(2)}, "(2,); give one logit per query head, (4,)"),
    "sinks is a number": ({"sinks": torch.tensor(1.0)}, "give one logit per query head"),
    "dropout of one": ({"dropout": 1.0}, "dropout=1.0 must be in [0, 1)"),
    "negative dropout": ({"dropout": -0.1}, "dropout=-0.1 must be in [0, 1)"),
    "softcap is a word": ({"softcap": "30"}, "softcap='30' must be positive"),
    "softcap to be learned": ({"softcap": torch.ones((), requires_grad=True)}, "no gradient"),
    "sinks is a list": ({"sinks": [0.0] * 4}, "give one logit per query head, (4,)"),
    "sinks of integers": ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks=int64 (4,)"),
    "bias is an array": ({"bias": np.zeros((50, 50))}, "bias=ndarray is not a tensor"),
    "dropout is nothing": ({"dropout": None}, "dropout=None must be in [0, 1)"),
    "dropout is not a number": ({"dropout": float("nan")}, "dropout=nan must be in [0, 1)"),
    "score is a word": ({"score": "cosine"}, "not one of hw.Dot, hw.Additive"),
    "additive weight": ({"score": hw.Additive(torch.ones(7))}, "needs (8,) or (4, 8)"),
    "general weight": ({"score": hw.General(torch.ones(8, 7))}, "needs (8, 8) or (4, 8, 8)"),
    "general heads": ({"score": hw.General(torch.ones(2, 8, 8))}, "or (4, 8, 8)"),
    "temperature": ({"score": hw.Cosine(torch.ones(2))}, "needs a scalar or (4,)"),
}

OBSERVING: dict[str, tuple[dict[str, object], str]] = {
    "unknown statistic": ({"stats": ("entropi",)}, "unknown statistic 'entropi'; choose from lse,"),
    "no rows": ({"rows": 0}, "rows=0"),
    "rows of a matrix": ({"rows": torch.zeros(2, 2, dtype=torch.int64)}, "(2, 2)"),
    "boolean rows": ({"rows": torch.ones(5, dtype=torch.bool)}, "torch.bool"),
    "rows beyond the queries": ({"rows": torch.tensor([1, 5])}, "outside 0 <= row < 5"),
    "rows in a list": (
        {"rows": [3, 1]},
        "rows=[3, 1] must be a number of rows, at least 1, or a tensor",
    ),
    "half a row": ({"rows": 2.5}, "rows=2.5 must be a number of rows"),
    "half a sink key": ({"sink_keys": 1.5}, "sink_keys=1.5"),
    "negative rows": ({"rows": torch.tensor([-1])}, "outside 0 <= row < 5"),
    "no sink keys": ({"sink_keys": 0}, "sink_keys=0"),
    "fused kernels": ({"engine": "sdpa"}, "statistics"),
}


def assert_restates(call: str, tensors: tuple[Tensor, ...], text: str, **options: object) -> None:
    """The call raises a ValueError that holds the text, and says the call as it was made."""
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        CALLS[call](*tensors, **options)
    said = str(caught.value)
    assert f"hw.{call}(q {str(tensors[0].dtype).removeprefix('torch.')} " in said
    for name, x in zip("qkv", tensors, strict=True):
        shapes = {str(tuple(x.shape)), str((1, *x.shape))}
        assert any(re.search(rf"{name} \w+ {re.escape(shape)}", said) for shape in shapes), said
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_that_do_not_fit_are_restated(call: str, case: str) -> None:
    *tensors, text = TENSORS[case]
    assert_restates(call, tuple(tensors), text)


LONGER = ("mask of another length", "documents of another length", "bias of another length")
LONGER += ("bounds of another length",)  # a part takes the tensors of a longer sequence
options = [
    (call, case) for call in CALLS for case in OPTIONS if call != "partial" or case not in LONGER
]


@pytest.mark.parametrize(("call", "case"), options)
def test_an_option_that_does_not_fit_is_restated(call: str, case: str) -> None:
    given, text = OPTIONS[case]
    assert_restates(call, (q, k, v), text, **given)


@pytest.mark.parametrize("case", OBSERVING)
def test_what_cannot_be_observed_is_restated(case: str) -> None:
    options, text = OBSERVING[case]
    assert_restates("observe", (q, k, v), text, **options)


@pytest.mark.parametrize("call", ["attention", "observe", "explain"])
def test_an_unknown_engine_is_restated(call: str) -> None:
    assert_restates(call, (q, k, v), "engine='flash' is unknown", engine="flash")


def test_a_part_needs_a_batch_axis() -> None:
    with pytest.raises(ValueError, match=r"hw\.partial needs a batch axis"):
        hw.partial(q[0], k[0], v[0])


def test_a_part_beyond_its_mask_is_restated() -> None:
    short = torch.ones(5, 6, dtype=torch.bool)
    assert_restates(
        "partial", (q, k, v), "does not broadcast", mask=hw.mask.dense(short), first_key=3
    )
    assert_restates("partial", (q, k, v), "does not broadcast", bias=short.float(), first_query=1)
    ids = torch.zeros(1, 6, dtype=torch.int64)
    assert_restates("partial", (q, k, v), "(2, 9)", mask=hw.mask.documents(ids), first_key=3)


@pytest.mark.parametrize("place", [{"first_query": -1}, {"first_key": -2}])
def test_a_part_cannot_stand_before_the_sequence(place: dict[str, int]) -> None:
    assert_restates("partial", (q, k, v), next(iter(place)), **place)


def test_a_mask_is_restated_by_its_shape_and_not_number_by_number() -> None:
    mask = hw.mask.causal() & hw.mask.documents(torch.arange(1000)[None])
    with pytest.raises(ValueError, match=r"mask=.*documents.*\(1, 1000\)") as caught:
        hw.attention(q, k, v, mask=mask)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_tensor_is_restated(call: str) -> None:
    with pytest.raises(ValueError, match=rf"need to be tensors\n  in hw\.{call}\(q list \[1\.0\]"):
        CALLS[call]([1.0], k, v)


WORDS: dict[str, tuple[Callable[[], object], str]] = {
    "a scale to be learned": (
        lambda: hw.Dot(torch.ones((), requires_grad=True)),
        "use hw.attention(q * scale, k, v, score=hw.Dot(1.0))",
    ),
    "a scale for each head": (lambda: hw.Dot(torch.ones(4)), "the scale must be a number"),
    "a scale in words": (lambda: hw.Dot("1"), "hw.Dot('1'): the scale must be a number"),
    "an additive list": (lambda: hw.Additive([1.0]), "hw.Additive takes a tensor (D,) or (Hq, D)"),
    "a general list": (lambda: hw.General([[1.0]]), "hw.General takes a tensor (Dq, Dk)"),
    "no temperature": (
        lambda: hw.Cosine(None),
        "hw.Cosine(None): the temperature must be a number",
    ),
    "no heads": (lambda: hw.ALiBi(0), "hw.ALiBi(0): give it the number of heads, or a tensor"),
    "slopes in a list": (lambda: hw.ALiBi([0.5]), "hw.ALiBi([0.5]): give it the number of heads"),
    "a list of buckets": (lambda: hw.RelativeBuckets([1.0]), "takes a tensor (buckets, Hq)"),
    "few buckets": (lambda: hw.RelativeBuckets(torch.zeros(3, 4)), "at least 4 buckets"),
    "one bucket": (lambda: hw.RelativeBuckets(torch.zeros(1, 4), False), "at least 2 buckets"),
    "a short way": (
        lambda: hw.RelativeBuckets(torch.zeros(32, 4), max_distance=8),
        "8 of the 32 buckets hold exact distances, so it must be an integer above 8",
    ),
    "all is dropped": (lambda: hw.Dropout(1.0), "dropout=1.0 must be in [0, 1)"),
}


@pytest.mark.parametrize("case", WORDS)
def test_what_a_call_is_made_of_is_refused_when_it_is_made(case: str) -> None:
    make, text = WORDS[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_a_scale_in_a_tensor_is_a_number() -> None:
    torch.testing.assert_close(
        hw.attention(q, k, v, score=hw.Dot(torch.tensor(0.5))),
        hw.attention(q, k, v, score=hw.Dot(0.5)),
    )


def test_a_map_restates_no_values_that_it_was_not_given() -> None:
    with pytest.raises(ValueError, match=r"hw\.attention_map\(q [^v]*\)$"):
        hw.attention_map(q, k[:1])
    with pytest.raises(ValueError, match=r"need to be tensors\n  in hw\.attention_map\(q .*k list"):
        hw.attention_map(q, [1.0])


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about sparse tensors and float8
def test_garbage_anywhere_is_taken_or_refused_in_words() -> None:
    wrong, count = {}, 0
    for name, call in garbage.calls():
        count += 1
        try:
            call()
        except (ValueError, TypeError):
            continue
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert count > 5000
    assert not wrong


@pytest.mark.parametrize("function", [hw.attention, hw.observe])
def test_the_keywords_of_other_functions_are_answered_with_ours(
    function: Callable[..., object],
) -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=r"'is_causal'; use mask=hw\.mask\.causal\(\)"):
        function(q, q, q, is_causal=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'$"):
        function(q, q, q, nonsense=1)
