/** The difference of two maps, cell by cell, on a symmetric colour scale. */

import type { Mode } from './colour';
import { weightOf } from './half';
import type { Cells } from './types';

/** The difference of two maps of one shape, weights and not their logarithms. */
export function difference(one: Cells, other: Cells): Float32Array {
  const result = new Float32Array(one.bits.length);
  for (let cell = 0; cell < result.length; cell++) {
    result[cell] = weightOf(one.bits[cell]!) - weightOf(other.bits[cell]!);
  }
  return result;
}

/** The size that all but one cell in a hundred stay below: single spikes must not hide the rest. */
export function typicalSize(values: Float32Array): number {
  const sizes = values.map(Math.abs).filter((size) => size > 0);
  sizes.sort();
  return sizes[Math.floor(sizes.length * 0.99)] ?? 1;
}

/** Red, green and blue of the two ends, and of no difference between them. */
const ENDS: Record<Mode, { more: number[]; none: number[]; less: number[] }> = {
  light: { more: [178, 74, 12], none: [253, 253, 251], less: [25, 88, 168] },
  dark: { more: [255, 160, 80], none: [18, 20, 25], less: [96, 168, 255] },
};

/** The colour of a difference, as CSS or canvas bytes take it. */
export function differenceColour(value: number, size: number, mode: Mode): number[] {
  const { more, none, less } = ENDS[mode];
  const end = value > 0 ? more : less;
  const strength = Math.min(1, Math.abs(value) / size) ** 0.7;
  return none.map((level, index) => Math.round(level + (end[index]! - level) * strength));
}

/** The picture of a difference, a pixel a cell. */
export function paintDifference(
  values: Float32Array,
  { rows, columns }: Cells,
  size: number,
  mode: Mode,
): ImageData {
  const image = new ImageData(columns, rows);
  values.forEach((value, cell) => {
    image.data.set([...differenceColour(value, size, mode), 255], cell * 4);
  });
  return image;
}
