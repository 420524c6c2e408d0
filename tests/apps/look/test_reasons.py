"""The edges behind a prediction: the sign, the order and the refusals of what is told."""

import pytest
import torch

from headwise import Edge
from headwise.apps.look.readers.opening import opened
from headwise.apps.look.readers.reader import silent
from headwise.apps.look.reasons import Reasons, hidden
from headwise.apps.look.scene import Input
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.terminal_view import explained
from headwise.watching import knock_out, runner_up
from tests.apps.look.sessions import session_on


@pytest.fixture(scope="module")
def read() -> Input:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return opened("gpt", "cpu").read("My dog chased the ball. My d", silent)


def test_the_induction_head_supports_the_word_that_returns(read: Input) -> None:
    told = explained(read, "d")
    assert (told.row, told.answer, told.probability > 0.9) == (11, "og", True)
    first = told.edges(40)[0]
    assert (read.main.rows[first.query], read.main.columns[first.key]) == (" d", "og")
    assert (first.layer, first.head) == (5, 1)  # an induction head of longer texts
    sizes = [abs(edge.support) for edge in told.edges(40)]
    assert sizes == sorted(sizes, reverse=True)


def test_the_support_of_an_edge_is_what_the_lead_loses_without_it(read: Input) -> None:
    told = explained(read, "11")
    predictor = read.predictor
    assert predictor is not None
    last = max(head.layer for head in read.main.heads)
    for edge in (x for x in told.edges(40) if x.layer == last and abs(x.support) < 0.5):
        module = read.main.head(f"{edge.layer}.{edge.head}").module
        hidden = Edge(module, edge.head, edge.key, (edge.query, edge.query + 1))
        with torch.no_grad(), knock_out(predictor.model, [hidden]):
            lead = float(runner_up(predictor.logits(told.row)))
        assert told.lead - lead == pytest.approx(edge.support, abs=0.25)


def test_the_support_of_a_head_is_the_gradient_along_its_output(read: Input) -> None:
    told = explained(read, "d")
    assert {(x.layer, x.head) for x in told.heads()} == {
        (x.layer, x.number) for x in read.main.heads
    }
    sizes = [abs(head.support) for head in told.heads()]
    assert sizes == sorted(sizes, reverse=True)
    first = told.heads()[0]
    assert (first.layer, first.head) == (5, 1)  # the induction head
    predictor = read.predictor
    assert predictor is not None
    (whole,) = hidden({"self": read.main}, f"self:{first.layer}.{first.head}")
    with torch.no_grad(), knock_out(predictor.model, [whole]):
        without = float(runner_up(predictor.logits(told.row)))
    assert without < told.lead  # it supports the prediction, and is switched off


def test_explaining_leaves_no_gradient_behind(read: Input) -> None:
    assert read.predictor is not None
    Reasons.of(read, read.predictor, 3)
    assert all(x.grad is None for x in read.predictor.model.parameters())


def test_a_token_that_is_not_there_is_named(read: Input) -> None:
    with pytest.raises(ValueError, match="there is no such token; the last ones are"):
        explained(read, "cat")


def test_what_is_no_row_and_no_edge_is_refused() -> None:
    session = session_on("to be or not to be")
    assert answer(session, "/api/inputs/0/reasons/99").status == 404
    assert answer(session, "/api/inputs/0/reasons/3/without?edges=self:9.9:1:0").status == 400
    assert answer(session, "/api/inputs/0/reasons/3/without?edges=nothing").status == 400
