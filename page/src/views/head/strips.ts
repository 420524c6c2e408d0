/** The margins of a map: a number a query on its right, a number a key above it. */

import type { Source } from '../../lib/source';
import type { HeadAddress, Strips } from '../../lib/types';
import type { Ink } from './axes';
import type { Frame } from './draw';
import type { Box } from './pyramid';
import type { Extent } from './view';

/** Numbers for the tokens from `start` to `stop`, each the mean over an equal part of them. */
export interface Strip {
  readonly start: number;
  readonly stop: number;
  readonly values: readonly (number | null)[];
}

export interface Margins {
  readonly entropy: Strip;
  readonly received: Strip;
}

const MOST = 1024; // numbers a strip has: more than a screen has room for

/** The margins of the part of a map in sight. */
export async function marginsOf(
  source: Source,
  head: HeadAddress,
  { left, top, right, bottom }: Box,
  { rows, columns }: Extent,
  signal: AbortSignal,
): Promise<Margins> {
  const all = left === 0 && top === 0 && right === columns && bottom === rows;
  const part = { row_start: top, row_stop: bottom, column_start: left, column_stop: right };
  const range = all ? {} : part; // a file holds the margins of the whole
  const strips: Strips = await source.strips(head, MOST, range, signal);
  return {
    entropy: { start: top, stop: bottom, values: strips.entropy },
    received: { start: left, stop: right, values: strips.received },
  };
}

/** The largest number of a strip between two tokens. */
export function mostOf({ start, stop, values }: Strip, from: number, to: number): number {
  const each = (stop - start) / values.length;
  let most = 0;
  values.forEach((value, index) => {
    const token = start + index * each;
    if (token + each > from && token < to) most = Math.max(most, value ?? 0);
  });
  return most;
}

/** Draw a strip along one side of the plot; `most` is the number that fills its room. */
export function drawStrip(
  context: CanvasRenderingContext2D,
  strip: Strip,
  place: Frame,
  upright: boolean,
  pixel: (token: number) => number,
  most: number,
  ink: Ink,
): void {
  const each = (strip.stop - strip.start) / strip.values.length;
  const room = (upright ? place.height : place.width) - 3;
  const base = upright ? place.top + place.height : place.left;
  const outline = new Path2D(); // one shape: bars of their own would show their seams
  const to = (along: number, high: number) =>
    upright ? outline.lineTo(along, base - high) : outline.lineTo(base + high, along);
  to(pixel(strip.start), 0);
  strip.values.forEach((value, index) => {
    const high = most > 0 ? (Math.min(value ?? 0, most) / most) * room : 0;
    to(pixel(strip.start + index * each), high);
    to(pixel(strip.start + (index + 1) * each), high);
  });
  to(pixel(strip.stop), 0);
  context.save();
  context.beginPath();
  context.rect(place.left, place.top, place.width, place.height);
  context.clip();
  context.fillStyle = ink.accent;
  context.globalAlpha = 0.55;
  context.fill(outline);
  context.restore();
}
