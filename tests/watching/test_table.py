"""A table of heads: rows, columns, and words for names that it has not."""

from collections.abc import Callable

import pytest

from headwise.watching import Table

HEADS = [{"layer": n // 2, "head": n % 2, "entropy_mean": float(4 - n)} for n in range(4)]


def test_a_slice_is_a_table_of_those_rows() -> None:
    some = Table(HEADS)[1:3]
    assert isinstance(some, Table)
    assert list(some) == HEADS[1:3]
    assert Table(HEADS)[9:].columns == ["layer", "head", "entropy_mean"]


def test_rows_are_chosen_and_sorted_and_none_may_be_left() -> None:
    table = Table(HEADS)
    assert table.where(layer=1)["head"] == [0, 1]
    assert table.sort("entropy_mean")["entropy_mean"] == [1.0, 2.0, 3.0, 4.0]
    none = table.where(layer=7)
    assert len(none.sort("entropy_mean").where(head=0)) == 0
    assert none["head"] == []
    assert repr(none) == "layer  head  entropy_mean"


def test_nan_comes_last_in_either_order() -> None:
    table = Table([{"x": float("nan")}, {"x": 1.0}, {"x": 2.0}])
    assert table.sort("x")["x"][:2] == [1.0, 2.0]
    assert table.sort("x", descending=True)["x"][:2] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda table: table["entropy"], KeyError),
        (lambda table: table.sort("entropy"), ValueError),
        (lambda table: table.where(entropy=3), ValueError),
    ],
    ids=["column", "sort", "where"],
)
def test_a_name_that_it_has_not_is_answered_with_those_it_has(
    ask: Callable[[Table], object], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"no column 'entropy'.*there are layer, head, entropy_mean"):
        ask(Table(HEADS))
    with pytest.raises(kind, match="no column 'entropy'; the table is empty"):
        ask(Table([]))


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant() -> None:
    for name in ("entropy", "entropy_men"):
        with pytest.raises(KeyError, match=r"; did you mean entropy_mean\?"):
            Table(HEADS)[name]


def test_a_wide_table_prints_what_fits_and_names_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"figure_{number}_mean" for number in range(20)]
    wide = Table([{"layer": 0, "name": "a", "head": 1, **dict.fromkeys(names, 0.5)}], note="(so)")
    wide = Table([row | {"entropy_mean": 2.0} for row in wide], note="(so)")
    monkeypatch.setenv("COLUMNS", "80")
    lines = repr(wide).splitlines()
    assert max(map(len, lines)) <= 80
    assert "entropy_mean" in lines[0]
    assert "more columns" in lines[-2]
    assert lines[-1] == "(so)"
    assert all(name in wide.text() for name in names)
    monkeypatch.setenv("COLUMNS", "500")
    assert all(name in repr(wide) for name in names)


def test_a_long_table_says_how_many_rows_it_leaves_out() -> None:
    rows = [{"head": head} for head in range(63)]
    for count, said in ((60, "59"), (61, "(1 row in"), (62, "(2 rows in")):
        assert Table(rows[:count]).text().splitlines()[-1].strip().startswith(said)


def test_an_empty_table_says_so() -> None:
    assert repr(Table([])) == "(an empty table)"
