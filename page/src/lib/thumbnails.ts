/** The small maps of a group's heads, and the colours that suit them. */

import { logSpan, type Scale, type Span } from './colour';
import type { Cells, Group, How, Thumbnails } from './types';

/** Cells a side: fewer where there are many heads, so that a group stays about a megabyte. */
export function thumbnailSize(heads: number): number {
  return heads <= 64 ? 96 : heads <= 300 ? 48 : 24;
}

/** The cells of one head. */
export function cellsAt(pictures: Thumbnails, index: number): Cells {
  const { rows, columns } = pictures;
  const size = rows * columns;
  return { rows, columns, bits: pictures.bits.subarray(index * size, (index + 1) * size) };
}

/**
 * From nothing to all of a row. A cell of means is full where rows spend everything in it, each of
 * its keys then getting an equal part.
 */
export function spanOf(cells: { columns: number }, group: Group, how: How, scale: Scale): Span {
  if (scale === 'log') return logSpan(group.columns);
  const keys = group.columns / cells.columns; // in a cell
  return { scale, low: 0, high: how === 'mean' ? 1 / keys : 1 };
}
