/** The small maps of a group's heads, and the colours that suit them. */

import type { Span, Scale } from './colour';
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
 * its keys then getting an equal part; and even attention lies a third up the logarithmic scale.
 */
export function spanOf(cells: { columns: number }, group: Group, how: How, scale: Scale): Span {
  const keys = group.columns / cells.columns; // in a cell
  const high = how === 'mean' ? 1 / keys : 1;
  const even = 1 / group.columns;
  return { scale, high, low: even * Math.sqrt(even / high) };
}
