"""The page's requests and their answers."""

import json
import math
from typing import Any

import pytest
import torch

from headwise.apps.look.atlas import PackedCells
from headwise.apps.look.serving import input_answers
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.session import Session
from tests.apps.look.sessions import session_on

TEXT = "The cat sat on the mat, and the <img src=x onerror=alert(1)> sat on the cat. " * 9


@pytest.fixture(scope="module")
def session() -> Session:
    return session_on(TEXT)


def asked(session: Session, path: str, status: int = 200) -> Any:
    given = answer(session, path)
    assert given.status == status, given.body
    return json.loads(given.body)


def numbers(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


def test_the_state_says_what_there_is(session: Session) -> None:
    state = asked(session, "/api/state")
    assert (state["state"], state["stage"], state["problem"]) == ("ready", None, None)
    assert state["model"] == {
        "name": "gpt",
        "parameters": 5573888,
        "layers": 6,
        "heads": 48,
        "context": 4096,
        "reads": "text",
    }
    (given,) = state["inputs"]
    assert given["kind"] == "text"
    assert [layer["heads"] for layer in given["groups"][0]["layers"]] == [8] * 6
    assert {"name": "entropy", "meaning": "-Σ p log p, in nats"} in state["statistics"]


def test_tokens_come_in_parts_and_stay_text(session: Session) -> None:
    everything = asked(session, "/api/inputs/0/tokens?group=self&axis=rows&start=0&stop=20000")
    assert "".join(everything["tokens"][1:]) == TEXT
    part = asked(session, "/api/inputs/0/tokens?group=self&axis=columns&start=2&stop=4")
    assert part == {"tokens": everything["tokens"][2:4], "total": everything["total"]}


def test_every_head_has_its_figures_and_a_type(session: Session) -> None:
    found = asked(session, "/api/inputs/0/heads")
    assert len(found["heads"]) == 48
    assert {"entropy_mean", "max_logit_max", "induction_mean"} <= set(found["columns"])
    previous = found["heads"][4 * 8 + 6]
    assert (previous["layer"], previous["head"], previous["type"]) == (4, 6, "previous-token")
    assert previous["figures"]["previous_mass_mean"] > 0.5


def test_thumbnails_are_those_of_every_head_in_order(session: Session) -> None:
    given = answer(session, "/api/inputs/0/thumbnails?group=self&how=max&size=16&drop=0")
    assert (given.headers["X-Rows"], given.headers["X-Columns"]) == ("16", "16")
    cells = PackedCells(given.body, 48 * 16, 16).weights().view(48, 16, 16)
    atlas = session.atlases["0"]
    for number, head in enumerate(atlas.input.main.heads):
        alone = atlas.thumbnail(atlas.input.main, head, 16, "max")
        assert torch.equal(cells[number], alone.weights())


def test_a_map_is_told_by_its_tiles_rows_columns_and_single_weights(session: Session) -> None:
    at = "/api/inputs/0/map/self/4/6"
    shape = asked(session, at)
    weights = session.atlases["0"].input.main.head("4.6").map[0, 0]
    rows, columns = weights.shape
    assert shape == {"rows": rows, "columns": columns, "levels": 2, "tile": 256, "causal": True}
    tile = answer(session, f"{at}/tile/1/0/1?how=mean&drop=0")
    tall, wide = (int(tile.headers[name]) for name in ("X-Rows", "X-Columns"))
    assert (tall, wide) == (rows - 256, 256)
    torch.testing.assert_close(
        PackedCells(tile.body, tall, wide).weights(), weights[256:, :256], rtol=0.012, atol=1e-12
    )
    torch.testing.assert_close(numbers(answer(session, f"{at}/row/100").body), weights[100])
    torch.testing.assert_close(numbers(answer(session, f"{at}/column/7").body), weights[:, 7])
    several = numbers(answer(session, f"{at}/row/100.102-104").body)
    torch.testing.assert_close(several, weights[[100, 102, 103, 104]].mean(0))
    several = numbers(answer(session, f"{at}/column/7-8").body)
    torch.testing.assert_close(several, weights[:, 7:9].mean(1))
    heads = session.atlases["0"].input.main.heads
    for which, some in (("4/all", [x for x in heads if x.layer == 4]), ("all/all", heads)):
        mean = torch.stack([head.map[0, 0, 100] for head in some]).mean(0)
        told = numbers(answer(session, f"/api/inputs/0/map/self/{which}/row/100").body)
        torch.testing.assert_close(told, mean)
    one = asked(session, f"{at}/weight/100/99")
    assert one["weight"] == pytest.approx(float(weights[100, 99]), rel=1e-5)
    assert math.exp(one["logit"] - one["lse"]) == pytest.approx(one["weight"])
    assert asked(session, f"{at}/weight/99/100")["logit"] is None  # the future is hidden


def test_strips_are_means_of_neighbours_also_of_a_part(session: Session) -> None:
    head = session.atlases["0"].input.main.head("4.6")
    at = "/api/inputs/0/map/self/4/6/strips"
    whole = asked(session, f"{at}?size=1024")
    assert whole["entropy"] == pytest.approx(head.entropy.tolist(), rel=1e-5, abs=1e-5)
    assert sum(whole["received"]) == pytest.approx(len(head.entropy), rel=1e-4)
    few = asked(session, f"{at}?size=2&row_start=10&row_stop=30&column_start=0&column_stop=8")
    assert few["entropy"] == pytest.approx(
        [float(head.entropy[10:20].mean()), float(head.entropy[20:30].mean())]
    )
    assert few["received"] == pytest.approx(
        [sum(whole["received"][:4]) / 4, sum(whole["received"][4:8]) / 4]
    )


def test_lines_are_the_largest_weights_of_a_row(session: Session) -> None:
    at = "/api/inputs/0/map/self/4/6/top"
    first, second = asked(session, f"{at}?row_start=0&row_stop=2&k=3")["rows"]
    assert first == [[0, pytest.approx(1, abs=1e-5)]]  # it sees one key
    assert len(second) == 2
    assert second[0][1] >= second[1][1]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/inputs/7/heads", 404, "no input 7"),
        ("/api/inputs/0/map/self/9/9", 404, "no head '9.9'"),
        ("/api/inputs/0/map/cross/0/0", 404, "no group 'cross'; there are self"),
        ("/api/inputs/0/map/self/0/0/tile/9/0/0", 404, "levels 0 to 1"),
        ("/api/inputs/0/map/self/0/0/tile/1/5/5", 404, "tiles x < 2, y < 2"),
        ("/api/inputs/0/map/self/0/0/tile/0/0/0?how=sum", 400, "use mean or max"),
        ("/api/inputs/0/map/self/0/0/tile/0/0/0?drop=-1", 400, "drop='-1' is not a number"),
        ("/api/inputs/0/map/self/0/0/row/100000", 404, "there are no tokens 100000"),
        ("/api/inputs/0/map/self/0/0/top?row_stop=600&k=3", 400, "not a number from 0 to"),
        ("/api/inputs/0/thumbnails?size=100000", 400, "not a number from 1 to 256"),
        ("/api/inputs/0/tokens?axis=diagonal", 400, "use rows or columns"),
        ("/api/inputs/0/image/0", 404, "has no image 0"),
        ("/api/inputs/../../etc/passwd", 404, "nothing at"),
        ("/api/watch", 404, "no run is being watched"),
    ],
)
def test_a_question_without_an_answer_is_told_why(
    session: Session, path: str, status: int, said: str
) -> None:
    refusal = asked(session, path, status)
    assert said in refusal["error"]
    library = ("levels 0 to 1", "tiles x < 2, y < 2", "out of range for an axis")  # speaks English
    assert (refusal["error"] in refusal.get("zh", {})) == (said not in library)


def test_too_many_lines_are_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_answers, "MOST_LINES", 10)
    path = "/api/inputs/0/map/self/0/0/top?row_start=0&row_stop=11&k=3"
    assert "11 rows; ask for at most 10" in asked(session, path, 400)["error"]


def test_a_translation_has_three_groups_with_their_own_axes() -> None:
    session = session_on("The cat is black.", "translate")
    (given,) = asked(session, "/api/state")["inputs"]
    assert given["notes"] == ["→ Le chat est noir."]
    shapes = {x["id"]: (x["rows"], x["columns"], x["causal"], x["square"]) for x in given["groups"]}
    english, french = shapes["encoder"][0], shapes["decoder"][0]
    assert shapes == {
        "encoder": (english, english, False, True),
        "decoder": (french, french, True, True),
        "cross": (french, english, False, False),
    }
    sizes = answer(session, "/api/inputs/0/thumbnails?group=cross&how=mean&size=48&drop=0").headers
    assert sizes == {"X-Rows": str(french), "X-Columns": str(english)}
    columns = asked(session, "/api/inputs/0/tokens?group=cross&axis=columns")["tokens"]
    assert columns[:2] == ["The", " cat"]
