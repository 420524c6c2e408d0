"""Pictures of maps: the weights themselves, pooled, and without the first keys."""

import pytest
import torch

import headwise as hw
from headwise.apps.look.atlas import Atlas, PackedCells, TileCache
from headwise.apps.look.scene import Group, Head, Input
from headwise.maps.pooling import How

NEAR = {"rtol": 0.012, "atol": 1e-12}  # two bytes hold two digits of the smallest weights


def scene(rows: int, columns: int, causal: bool) -> tuple[Atlas, Group, Head]:
    q, k = torch.randn(1, 1, rows, 8), torch.randn(1, 1, columns, 8)
    amap = hw.attention_map(2 * q, k, mask=hw.mask.causal() if causal else None)
    head = Head(0, 0, "attention", {}, amap, torch.zeros(rows), torch.zeros(rows))
    tokens = [tuple(map(str, range(count))) for count in (rows, columns)]
    group = Group("self", "self", causal, tokens[0], tokens[1], (head,))
    return Atlas(Input("noise", "text", (group,))).prepare(), group, head


def pooled(weights: torch.Tensor, cell: int, how: How) -> torch.Tensor:
    """Cell by cell, the plainest way."""
    rows, columns = weights.shape
    place = (torch.arange(rows) // cell)[:, None], torch.arange(columns) // cell
    cells = torch.zeros(-(-rows // cell), -(-columns // cell))
    flat = (place[0] * cells.shape[1] + place[1]).flatten()
    reduce = {"mean": "mean", "max": "amax"}[how]
    cells.view(-1).scatter_reduce_(0, flat, weights.flatten(), reduce, include_self=False)
    return cells


@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("drop", [0, 1, 4, 301])
@pytest.mark.parametrize(("level", "x", "y"), [(0, 0, 0), (1, 0, 1), (2, 1, 0)])
def test_a_tile_shows_the_weights_as_if_the_dropped_keys_got_none(
    level: int, x: int, y: int, drop: int, how: How
) -> None:
    atlas, group, head = scene(600, 530, causal=False)
    weights = head.map[0, 0].clone()
    weights[:, :drop] = 0
    cell = 1 << (2 - level)
    whole = pooled(weights, cell, how)
    expected = whole[256 * y : 256 * (y + 1), 256 * x : 256 * (x + 1)]
    tile = atlas.tile(group, head, level, x, y, how, drop)
    assert (tile.rows, tile.columns) == expected.shape
    torch.testing.assert_close(tile.weights(), expected, **NEAR)


@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("size", [7, 32, 256])
def test_a_thumbnail_is_the_map_in_few_cells(size: int, how: How) -> None:
    atlas, group, head = scene(192, 192, causal=True)
    picture = atlas.thumbnail(group, head, size, how)
    expected = head.map.pool(size, how)[0, 0]
    torch.testing.assert_close(picture.weights(), expected, **NEAR)


def test_a_thumbnail_of_a_pooled_overview_keeps_the_mean_and_the_largest() -> None:
    atlas, group, head = scene(1000, 1000, causal=True)
    for how in ("mean", "max"):
        cells = atlas.thumbnail(group, head, 16, how).weights()
        assert cells.shape == (16, 16)
    weights = head.map[0, 0]
    mean = atlas.thumbnail(group, head, 16, "mean").weights()
    assert float(mean.mean()) == pytest.approx(float(weights.mean()), rel=0.02)
    largest = atlas.thumbnail(group, head, 16, "max").weights()
    assert float(largest.max()) == pytest.approx(float(weights.max()), rel=0.005)


def test_a_short_text_keeps_every_weight() -> None:
    atlas, group, head = scene(5, 3, causal=False)
    picture = atlas.thumbnail(group, head, 32, "mean")
    assert (picture.rows, picture.columns) == (5, 3)
    torch.testing.assert_close(picture.weights(), head.map[0, 0], **NEAR)


def test_what_receives_most_is_the_sum_of_its_column() -> None:
    atlas, group, head = scene(40, 40, causal=True)
    torch.testing.assert_close(atlas.received(group, head), head.map[0, 0].sum(0))


def test_pictures_are_made_once_and_the_longest_unused_is_forgotten() -> None:
    made: list[str] = []

    def make(name: str) -> PackedCells:
        made.append(name)
        return PackedCells(bytes(10), 1, 5)

    cache = TileCache(most=25)
    for name in ("a", "b", "a", "c", "a", "b"):
        cache.get((name,), lambda name=name: make(name))  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]
    assert cache.size == 20
