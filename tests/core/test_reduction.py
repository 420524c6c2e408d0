"""Reduced statistics: sums of rows become means of each head."""

import torch

from headwise.core.reduction import CallRows, Columns, reduce_rows


def test_every_head_is_divided_by_its_own_number_of_rows() -> None:
    columns = Columns(("entropy",))
    entropy = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 7.0, 100.0, 100.0]]])
    highest = torch.zeros(1, 2, 4).masked_fill(entropy == 100, -torch.inf)  # rows that see nothing
    added, extremes = reduce_rows(
        CallRows([entropy], highest, None, None, columns.maxima, columns.minima)
    )
    figures = columns.figures(torch.cat((added, extremes)), sampled=False)
    assert figures["entropy_mean"].tolist() == [2.5, 6.0]
    assert figures["entropy_min"].tolist() == [1.0, 5.0]
