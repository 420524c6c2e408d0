"""One record of row sums: everything that is derived from it has its fields."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.core.partial import merge
from headwise.core.row_sums import EVERYTHING, FLAGS, ROW_SUMS, RowParts, RowResults, empty_results


def test_every_sum_has_its_place_in_every_record() -> None:
    assert [name for name in RowResults._fields if name in ROW_SUMS] == list(ROW_SUMS)
    assert RowParts._fields[3:] == RowResults._fields[4:]
    assert tuple(FLAGS) == RowResults._fields[3:]
    assert all(name in hw.STATISTICS for name in ROW_SUMS)


@pytest.mark.parametrize("wants", [0, EVERYTHING, *FLAGS.values()])
def test_room_is_made_for_what_is_asked(wants: int) -> None:
    q = torch.randn(2, 3, 4, 8)
    made = empty_results(q, q, wants)._asdict()
    assert {name for name, x in made.items() if x is not None} == {
        *("out", "lse", "max_logit"),
        *(name for name, flag in FLAGS.items() if wants & flag),
    }


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["alone", "sinks"])
@pytest.mark.parametrize("name", ROW_SUMS)
def test_a_sum_over_parts_gives_the_statistic_of_all_keys(
    name: str, sinks: torch.Tensor | None
) -> None:
    q, k, v = (3 * torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)).unbind(0)
    mask = hw.mask.causal()
    parts = [
        hw.partial(q, k[:, :, i:j], v[:, :, i:j], first_key=i, mask=mask, sinks=sinks)
        for i, j in ((0, 2), (2, 3), (3, 9))
    ]
    whole = merge(*parts)
    found = getattr(whole.results(whole.finish()), name)
    _, seen = hw.observe(q, k, v, mask=mask, sinks=sinks, engine="reference")
    torch.testing.assert_close(found, getattr(seen, name))
