"""Every family of transformers that builds from a tiny config is read, or says what is not."""

import pytest

from tests.watching import sweep

QUICK = ("bloom", "led", "llama", "paligemma", "wavlm")
_, RECORDED = sweep.recorded()


@pytest.mark.parametrize(
    "recorded",
    [
        each if each.family in QUICK else pytest.param(each, marks=pytest.mark.slow)
        for each in RECORDED
    ],
    ids=lambda recorded: recorded.family,
)
def test_a_family_is_as_the_record_says(recorded: sweep.Result) -> None:
    found = sweep.check(recorded.family)
    assert (found.verdict, found.unread) == (recorded.verdict, recorded.unread), found
    assert found.wrong == recorded.wrong, found
    if recorded.family in QUICK:
        assert found.verdict == "read"


def test_the_documents_show_the_record() -> None:
    for path, text in sweep.documents().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run the sweep with --write"


def test_the_record_has_every_family_and_most_of_them_are_read() -> None:
    assert [each.family for each in RECORDED] == sweep.families()
    built = [each for each in RECORDED if each.built == "yes"]
    attending = [each for each in built if each.verdict != "no softmax attention"]
    assert len(built) >= 450
    assert sum(each.verdict == "read" for each in attending) >= 0.95 * len(attending)


def test_a_row_says_what_is_not_read_and_what_is_wrong() -> None:
    results = [
        sweep.Result("llama", heads=8, compared=8, bits="same", figures="3e-07", clip="done"),
        sweep.Result("led", heads=8, unread=["a.b"], bits="same", figures="wrong: off by 2"),
        sweep.Result("clip", built="ValueError: no"),
    ]
    assert sweep.table(results).splitlines()[2:] == [
        "| llama | read | 8 | 8 | 3e-07 | done |  |",
        "| led | wrong | 8 | 0 | – | – | not read: `a.b`; figures: off by 2 |",
        "| clip | not built | – | – | – | – | ValueError: no |",
    ]
    assert "3 families, of which 2 build" in sweep.summary("a machine", results)
