/** The visible part of a map: its middle, and the size of a token. */

import type { Box } from './pyramid';

/** The size of the map in tokens. */
export interface Extent {
  readonly rows: number;
  readonly columns: number;
}

/** A size on the screen, in CSS pixels. */
export interface Size {
  readonly width: number;
  readonly height: number;
}

/** Pixel = token · scale + shift, along the keys (x) and along the rows (y). */
export interface View {
  readonly scale: number;
  readonly x: number;
  readonly y: number;
}

/** The view as an address keeps it: the same on every screen. */
export interface Place {
  /** Magnification; 1 shows the whole map. */
  readonly zoom: number;
  /** The token in the middle, along the keys and along the rows. */
  readonly x: number;
  readonly y: number;
}

/** Pixels along the side of a token at the largest zoom: room for its text and its weight. */
const LARGEST = 56;

/** Pixels per token when the whole map fits. */
export function fitting({ rows, columns }: Extent, { width, height }: Size): number {
  return Math.min(width / Math.max(1, columns), height / Math.max(1, rows));
}

/** Pixels per token at the largest zoom. */
export function largest(extent: Extent, size: Size): number {
  return Math.max(LARGEST, fitting(extent, size) * 2);
}

/** The view that shows a place in a window of this size. */
export function viewOf({ zoom, x, y }: Place, extent: Extent, size: Size): View {
  const scale = Math.min(largest(extent, size), fitting(extent, size) * Math.max(1, zoom));
  return {
    scale,
    x: shift(x, scale, extent.columns, size.width),
    y: shift(y, scale, extent.rows, size.height),
  };
}

/** The place that a view shows. */
export function placeOf(view: View, extent: Extent, size: Size): Place {
  return {
    zoom: view.scale / fitting(extent, size),
    x: (size.width / 2 - view.x) / view.scale,
    y: (size.height / 2 - view.y) / view.scale,
  };
}

/** The whole map. */
export function whole({ rows, columns }: Extent): Place {
  return { zoom: 1, x: columns / 2, y: rows / 2 };
}

/** True if two views look the same. */
export function sameView(one: View, other: View): boolean {
  const near = (a: number, b: number) => Math.abs(a - b) < 1e-3;
  return (
    Math.abs(one.scale / other.scale - 1) < 1e-9 && near(one.x, other.x) && near(one.y, other.y)
  );
}

/** The tokens that a view shows; more than there are where the map is smaller than the window. */
export function boxIn({ scale, x, y }: View, { width, height }: Size): Box {
  return {
    left: -x / scale,
    top: -y / scale,
    right: (width - x) / scale,
    bottom: (height - y) / scale,
  };
}

/** The pixel that stays while one zooms: what is chosen; the middle where that is out of sight. */
export function fixedPoint(
  view: View,
  { width, height }: Size,
  row: number | null,
  column: number | null,
): [number, number] {
  const along = (token: number | null, first: number, room: number) => {
    const pixel = token === null ? NaN : first + (token + 0.5) * view.scale;
    return pixel >= 0 && pixel <= room ? pixel : room / 2;
  };
  return [along(column, view.x, width), along(row, view.y, height)];
}

/** Where the middle token puts the first one, without leaving a side of the window needlessly bare. */
function shift(middle: number, scale: number, length: number, room: number): number {
  const spare = room - length * scale;
  if (spare >= 0) return spare / 2;
  return Math.min(0, Math.max(spare, room / 2 - middle * scale));
}
