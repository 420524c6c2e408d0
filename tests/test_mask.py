"""A mask shows exactly the keys that its words say, and its intervals say so without waste."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from headwise.core.intervals import inside
from headwise.core.mask_parts import part_of
from headwise.core.options import Options
from headwise.core.place import Place
from headwise.core.problem import pose
from headwise.mask import Mask
from tests import problems
from tests.problems import KINDS, Rule, Sizes

MASKS = [kind for kind in KINDS["mask"] if kind != "none"]


@st.composite
def rules(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(MASKS)) -> tuple[Sizes, Rule]:
    """A mask of any kind for a drawn shape."""
    queries, keys = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    sizes = Sizes(draw(st.integers(1, 3)), 4, 2, queries, keys)
    dice = random.Random(draw(st.integers(0, 2**32 - 1)))
    return sizes, problems.rule(draw(st.sampled_from(kinds)), sizes, dice)


def place_of(sizes: Sizes) -> Place:
    return Place(sizes.batch, sizes.heads, sizes.queries, sizes.keys, offset=sizes.offset)


def shown(mask: Mask, place: Place) -> torch.Tensor:
    """The mask as booleans for every batch entry and head."""
    shape = place.batch, place.heads, place.queries, place.keys
    return mask.to_dense(place).expand(shape)


def rows_of(mask: Mask, queries: int, keys: int) -> list[str]:
    """The mask of one head, a string a row."""
    place = Place(1, 1, queries, keys, offset=keys - queries)
    return ["".join(".#"[int(x)] for x in row) for row in shown(mask, place)[0, 0].tolist()]


@given(rules())
def test_a_mask_shows_what_its_words_say_pair_by_pair(drawn: tuple[Sizes, Rule]) -> None:
    sizes, rule = drawn
    rule.mask.check(place_of(sizes))
    assert torch.equal(shown(rule.mask, place_of(sizes)), rule.matrix(sizes))


@given(rules())
def test_the_intervals_of_a_row_hold_each_visible_key_once(drawn: tuple[Sizes, Rule]) -> None:
    sizes, rule = drawn
    assert rule.mask.pieces == rule.pieces
    if rule.pieces == 0:
        return
    place = place_of(sizes)
    intervals = rule.mask.intervals(place)
    assert len(intervals) == rule.pieces <= 2
    columns = place.columns()
    count = torch.zeros(sizes.batch, sizes.heads, sizes.queries, sizes.keys, dtype=torch.int64)
    for first, last in intervals:
        assert first.dtype == last.dtype == torch.int32
        count += (columns >= first[..., None]) & (columns < last[..., None])
    assert torch.equal(count, rule.matrix(sizes).long())


@given(rules(("padding", "documents", "between", "prefix-lm")), st.booleans())
def test_a_band_and_the_intervals_beside_it_show_the_same_keys(
    drawn: tuple[Sizes, Rule], causal: bool
) -> None:
    sizes, rule = drawn
    rule = problems.causal(sizes) & rule if causal else rule
    q = torch.zeros(sizes.batch, sizes.heads, sizes.queries, 4)
    k = torch.zeros(sizes.batch, sizes.heads, sizes.keys, 4)
    terms = pose("attention", q, k, k, Options(mask=rule.mask)).terms(banded=True)
    bounds = terms.without_band(sizes.queries, sizes.keys).intervals
    wanted = rule.matrix(sizes)
    found = (
        torch.ones_like(wanted).bool()
        if bounds is None
        else inside(bounds[..., None], torch.arange(sizes.keys))
    )
    assert torch.equal(found.expand_as(wanted), wanted)


@given(rules(), st.data())
def test_a_part_of_the_sequence_sees_its_part_of_the_mask(
    drawn: tuple[Sizes, Rule], data: st.DataObject
) -> None:
    sizes, rule = drawn
    first_query = data.draw(st.integers(0, sizes.queries - 1))
    queries = data.draw(st.integers(1, sizes.queries - first_query))
    first_key = data.draw(st.integers(0, sizes.keys - 1))
    keys = data.draw(st.integers(1, sizes.keys - first_key))
    spot = first_query, first_key, sizes.offset
    part = Place(sizes.batch, 4, queries, keys, *spot, whole=False)
    rule.mask.check(part)
    whole = rule.matrix(sizes)
    wanted = whole[:, :, first_query : first_query + queries, first_key : first_key + keys]
    assert torch.equal(shown(rule.mask, part), wanted)


@given(rules(), st.data())
def test_some_heads_and_batch_entries_see_their_part_of_the_mask(
    drawn: tuple[Sizes, Rule], data: st.DataObject
) -> None:
    sizes, rule = drawn
    place = replace(place_of(sizes), heads=4)
    batch, heads = (
        range(data.draw(st.integers(0, count - 1)), count) for count in (sizes.batch, 4)
    )
    mask = part_of(rule.mask, place, batch, heads)
    assert mask is not None
    found = shown(mask, replace(place, batch=len(batch), heads=len(heads)))
    whole = rule.matrix(sizes).expand(sizes.batch, 4, -1, -1)
    assert torch.equal(found, whole[batch.start :, heads.start :])
    misfit = replace(place, batch=len(batch) + 1, heads=len(heads))
    if mask is not rule.mask:
        with pytest.raises(ValueError, match=f"the mask is of {len(batch)} batch entries"):
            mask.check(misfit)
    causal = hw.mask.causal()  # which is the same for all
    assert part_of(causal, replace(place, batch=3), range(1), range(4)) is causal


@given(rules())
def test_what_a_mask_promises_without_reading_tensors_is_true(drawn: tuple[Sizes, Rule]) -> None:
    sizes, rule = drawn
    matrix, place = rule.matrix(sizes), place_of(sizes)
    if rule.mask.shows_all(place):
        assert matrix.all()
    if rule.mask.rows_alike:
        assert (matrix == matrix[:, :, :1]).all()
    stated = rule.mask.alignment(place)
    if stated is not None:
        shift = torch.as_tensor(stated).reshape(-1, 1)
        assert torch.equal(
            (shift + torch.arange(sizes.queries)).expand(sizes.batch, -1).long(),
            rule.positions(sizes),
        )


@given(
    rules(("causal", "offsets", "window", "padding", "between", "documents", "dense")), st.data()
)
def test_both_and_either_are_and_and_or(drawn: tuple[Sizes, Rule], data: st.DataObject) -> None:
    sizes, a = drawn
    dice = random.Random(data.draw(st.integers(0, 2**32 - 1)))
    b = problems.rule(data.draw(st.sampled_from(("causal", "padding", "between"))), sizes, dice)
    left, right, place = a.matrix(sizes), b.matrix(sizes), place_of(sizes)
    assert torch.equal(shown(a.mask & b.mask, place), left & right)
    assert torch.equal(shown(a.mask | b.mask, place), left | right)


@given(rules(), st.booleans())
def test_a_band_and_the_rest_show_together_what_the_mask_shows(
    drawn: tuple[Sizes, Rule], causal: bool
) -> None:
    sizes, rule = drawn
    place = place_of(sizes)
    mask = hw.mask.causal() & rule.mask if causal else rule.mask
    band, rest = mask.apart(place)
    assert band is not None or rest is mask
    seen = torch.ones_like(rule.matrix(sizes)) if rest is None else shown(rest, place)
    if band is not None:
        away = torch.arange(sizes.keys) - torch.arange(sizes.queries)[:, None]  # j - i
        seen = seen & (away >= band[0]) & (away < band[1])
    assert torch.equal(seen, shown(mask, place))
    ready = None if rest is None else rest.table(place)
    if rest is not None and ready is not None:
        for bound, same in zip(ready[0], rest.intervals(place)[0], strict=True):
            assert torch.equal(bound, same)


def test_causal_masks_align_the_last_query_with_the_last_key() -> None:
    assert rows_of(hw.mask.causal(), 3, 3) == ["#..", "##.", "###"]
    assert rows_of(hw.mask.causal(), 2, 4) == ["###.", "####"]
    assert rows_of(hw.mask.causal(), 4, 2) == ["..", "..", "#.", "##"]
    assert rows_of(hw.mask.causal(0), 2, 4) == ["#...", "##.."]


def test_an_offset_may_be_a_number_a_list_or_a_tensor() -> None:
    place = Place(2, 1, 3, 6, offset=3)
    same = [hw.mask.causal(1), hw.mask.causal([1, 1]), hw.mask.causal(torch.tensor([1, 1]))]
    for mask in same:
        assert torch.equal(shown(mask, place), shown(same[0], place))
    each = shown(hw.mask.causal([0, 2]), place)
    assert torch.equal(each[:1], shown(hw.mask.causal(0), Place(1, 1, 3, 6)))
    assert torch.equal(each[1:], shown(hw.mask.causal(2), Place(1, 1, 3, 6)))


def test_an_integer_of_numpy_is_an_integer() -> None:
    assert repr(hw.mask.causal(np.int64(2))) == "causal(offset=2)"
    assert repr(hw.mask.window(np.int8(100), np.int8(100))) == "window(100, right=100)"
    assert rows_of(hw.mask.lengths(np.array([2])), 1, 3) == ["##."]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hw.mask.causal(True), r"causal\(offset\) takes integers, not True"),
        (lambda: hw.mask.causal(1.5), "not 1.5"),
        (lambda: hw.mask.causal([1.0, 2.0]), r"not \[1.0, 2.0\]"),
        (lambda: hw.mask.causal("1"), "not '1'"),
        (lambda: hw.mask.window(1.5), r"window\(left=1.5, right=0\) takes integers"),
        (lambda: hw.mask.window(4, True), r"right=True\) takes integers"),
        (lambda: hw.mask.window(4, offset=0.5), r"window\(..., offset\) takes integers"),
        (lambda: hw.mask.prefix(2.5), r"prefix\(p\) takes integers"),
        (lambda: hw.mask.lengths([3.7]), r"lengths\(n\) takes integers"),
        (lambda: hw.mask.lengths(torch.tensor([3.0])), "not a torch.float32 tensor"),
        (lambda: hw.mask.lengths(torch.tensor([True])), "not a torch.bool tensor"),
        (lambda: hw.mask.lengths(None), "not None"),
        (lambda: hw.mask.between(torch.zeros(3), torch.ones(3)), r"between\(first, last\)"),
    ],
)
def test_what_is_no_integer_is_refused_and_never_rounded(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_windows_count_from_the_query_to_both_sides() -> None:
    assert rows_of(hw.mask.window(1), 4, 4) == ["#...", "##..", ".##.", "..##"]
    assert rows_of(hw.mask.window(0, 1), 3, 3) == ["##.", ".##", "..#"]
    assert rows_of(hw.mask.window(-1, 2), 4, 4) == [".##.", "..##", "...#", "...."]
    nine = rows_of(hw.mask.causal() & hw.mask.window(8), 20, 20)
    assert max(row.count("#") for row in nine) == 9


def test_a_prefix_language_model_sees_its_prefix_whole_and_the_rest_causally() -> None:
    mask = hw.mask.causal() | hw.mask.prefix(2)
    assert rows_of(mask, 4, 4) == ["##..", "##..", "###.", "####"]


def test_sinks_and_a_window_are_two_intervals_that_meet_without_counting_a_key_twice() -> None:
    mask = hw.mask.causal() & (hw.mask.window(1) | hw.mask.prefix(2))
    assert mask.pieces == 2
    assert rows_of(mask, 6, 6) == ["#.....", "##....", "###...", "####..", "##.##.", "##..##"]


def test_equal_ids_that_are_not_neighbours_are_different_documents() -> None:
    mask = hw.mask.documents(torch.tensor([7, 7, 2, 7, 7]))
    assert rows_of(mask, 5, 5) == ["##...", "##...", "..#..", "...##", "...##"]


def test_the_queries_of_a_cache_are_the_last_of_the_documents() -> None:
    mask = hw.mask.causal() & hw.mask.documents(torch.tensor([[0, 0, 1, 1]]))
    assert rows_of(mask, 2, 4) == ["..#.", "..##"]


def test_a_query_before_the_first_key_belongs_to_no_document() -> None:
    assert rows_of(hw.mask.documents(torch.tensor([[0, 0]])), 3, 2) == ["..", "##", "##"]


def test_a_query_behind_the_last_key_belongs_to_no_document() -> None:
    for ids in ([0], [0, 0, 1]):
        mask = hw.mask.documents(torch.tensor(ids))
        dense = shown(mask, Place(1, 1, 2, len(ids), offset=len(ids) - 1))
        assert dense[0, 0].tolist() == [[x == ids[-1] for x in ids], [False] * len(ids)]


def test_padding_on_the_left_is_an_interval_too() -> None:
    first = torch.tensor([2, 0]).reshape(2, 1, 1)
    mask = hw.mask.causal() & hw.mask.between(first, torch.tensor(4))
    dense = shown(mask, Place(2, 1, 4, 4))
    assert dense[0, 0, :, :2].sum() == 0
    assert torch.equal(dense[1, 0], torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_sequence_starts_where_its_document_or_its_padding_says() -> None:
    place = Place(1, 1, 5, 5)
    documents = hw.mask.documents(torch.tensor([0, 0, 1, 1, 1]))
    assert documents.start(place).flatten().tolist() == [0, 0, 2, 2, 2]
    assert (hw.mask.causal() & documents).start(place).flatten().tolist() == [0, 0, 2, 2, 2]
    padded = hw.mask.between(torch.tensor([3]), torch.tensor([5]))
    assert (hw.mask.causal() & padded).start(place).flatten().tolist() == [3]
    assert hw.mask.causal().start(place) == 0


def test_interval_masks_take_memory_for_rows_and_not_for_pairs() -> None:
    place = Place(1, 8, 1000, 1000)
    mask = hw.mask.causal() & (hw.mask.window(9) | hw.mask.prefix(4))
    assert sum(bound.numel() for piece in mask.intervals(place) for bound in piece) <= 4 * 1000


def test_more_than_two_intervals_per_row_are_an_error_that_says_what_to_use() -> None:
    a, b, c = hw.mask.window(1), hw.mask.prefix(2), hw.mask.lengths(5)
    with pytest.raises(ValueError, match=r"3 intervals per row.*at most two.*hw\.mask\.dense"):
        (a | b) | c
    with pytest.raises(ValueError, match="4 intervals per row"):
        (a | b) & (b | c)
    assert ((a | b) & c).pieces == 2


@pytest.mark.parametrize("sign", ["&", "|"])
def test_both_masks_of_a_combination_must_fit_the_call(sign: str) -> None:
    right, wrong = hw.mask.causal(), hw.mask.documents(torch.tensor([0, 0, 1]))
    for pair in ((right, wrong), (wrong, right)):
        mask = pair[0] & pair[1] if sign == "&" else pair[0] | pair[1]
        with pytest.raises(ValueError, match="ids have shape"):
            mask.check(Place(1, 1, 5, 5))


def test_dense_with_anything_is_dense() -> None:
    dense = hw.mask.dense(torch.eye(3, dtype=torch.bool))
    two = hw.mask.window(1) | hw.mask.prefix(2)
    for mask in (dense & two, two & dense, dense | two, two | dense, dense & dense | two):
        assert mask.pieces == 0


def test_a_dense_mask_takes_booleans_only() -> None:
    with pytest.raises(ValueError, match=r"True = may attend.*float32.*bias="):
        hw.mask.dense(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="not 'causal'"):
        hw.mask.dense("causal")
    assert rows_of(hw.mask.dense([[True, False]]), 1, 2) == ["#."]


@pytest.mark.parametrize("sign", ["&", "|"])
def test_a_tensor_beside_a_mask_is_an_error_that_says_what_to_use(sign: str) -> None:
    join = {"&": operator.and_, "|": operator.or_}[sign]
    mask, tensor = hw.mask.causal(), torch.ones(3, 3, dtype=torch.bool)
    for pair in ((mask, tensor), (tensor, mask)):
        with pytest.raises(ValueError, match=rf"a \{sign} b.*torch.bool tensor; .*hw\.mask\.dense"):
            join(*pair)


FAR = 2**31 - 1
UNBOUNDED: dict[str, tuple[Mask, Mask]] = {  # a number beyond every key, and how it is said without
    "left": (hw.mask.window(2**40), hw.mask.causal()),
    "right": (hw.mask.window(0, right=FAR), hw.mask.between(torch.arange(5), torch.tensor(9))),
    "a batch entry's": (hw.mask.window(FAR, offset=[3, -3]), hw.mask.causal(offset=[3, -3])),
    "length": (hw.mask.lengths([2**40, 4]), hw.mask.lengths([9, 4])),
    "prefix": (hw.mask.prefix(FAR), hw.mask.prefix(9)),
    "between": (
        hw.mask.between(torch.zeros(5, dtype=torch.int64), torch.full((5,), 2**62)),
        hw.mask.prefix(9),
    ),
    "before all": (hw.mask.causal(offset=-(2**30)), hw.mask.causal(offset=-5)),
}


@pytest.mark.parametrize("case", UNBOUNDED)
def test_numbers_beyond_every_key_mean_what_they_say(case: str) -> None:
    place = Place(2, 1, 5, 5)
    found, wanted = (shown(mask, place) for mask in UNBOUNDED[case])
    assert found.equal(wanted)


def test_an_offset_that_no_sequence_reaches_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"causal\(offset\): an offset of 1099511627776"):
        hw.mask.causal(offset=2**40)


def test_a_window_that_shows_no_key_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"window\(left=-2, right=1\)"):
        hw.mask.window(-2, 1)


@pytest.mark.parametrize("kind", MASKS)
def test_masks_can_be_copied_deeply_and_printed(kind: str) -> None:
    sizes = Sizes()
    rule = problems.rule(kind, sizes, random.Random(3))
    twin = copy.deepcopy(rule.mask)
    assert torch.equal(shown(twin, place_of(sizes)), rule.matrix(sizes))
    said = {"Both": "&", "Either": "|", "Lengths": "("}.get(type(rule.mask).__name__)
    assert (said or type(rule.mask).__name__.lower()) in repr(rule.mask)
