/** Lines from queries to the keys they look at most: which keys are listed, and where lines run. */

import type { TopKeys } from '../../lib/types';

/** A line from the query at one place of the left list to the key at a place of the right one. */
export interface Curve {
  readonly row: number;
  readonly key: number;
  readonly weight: number;
  readonly from: number;
  readonly to: number;
}

export interface Curves {
  readonly rows: readonly number[];
  readonly keys: readonly number[];
  readonly curves: readonly Curve[];
  /** The number of keys left out of the list. */
  readonly leftOut: number;
}

/** Queries whose lines are drawn, at most. */
export const MOST_ROWS = 64;

const ALL_KEYS = 64; // of a text no longer than this every key is listed
const MOST_KEYS = 40; // of a longer one the strongest

const AROUND = 8; // rows before and after the chosen one

/**
 * Lay out the `most` largest weights of each row from `first` on, without the first `drop` keys.
 * Of a short text every key is listed.
 */
export function curvesOf(
  first: number,
  top: TopKeys,
  columns: number,
  drop: number,
  most: number,
): Curves {
  const rows = top.rows.map((_, index) => first + index);
  const kept = top.rows.map((pairs) => pairs.filter(([key]) => key >= drop).slice(0, most));
  const mass = new Map<number, number>();
  for (const [key, weight] of kept.flat()) mass.set(key, (mass.get(key) ?? 0) + weight);
  const strongest = [...mass.keys()].sort((one, other) => mass.get(other)! - mass.get(one)!);
  const all = columns <= ALL_KEYS;
  const keys = all
    ? Array.from({ length: columns }, (_, key) => key)
    : strongest.slice(0, MOST_KEYS).sort((one, other) => one - other);
  const places = new Map(keys.map((key, place) => [key, place]));
  const curves = kept.flatMap((pairs, from) =>
    pairs.flatMap(([key, weight]): Curve[] => {
      const to = places.get(key);
      return to === undefined ? [] : [{ row: first + from, key, weight, from, to }];
    }),
  );
  const leftOut = all ? 0 : Math.max(0, strongest.length - MOST_KEYS);
  return { rows, keys, curves, leftOut };
}

/** The rows whose lines are shown by default: the visible ones, or some around the chosen one. */
export function defaultSpan(
  inSight: readonly [number, number],
  row: number | null,
  length: number,
): [number, number] {
  const [start, stop] = inSight;
  if (stop - start <= 2 * AROUND) return [start, stop];
  const first = Math.max(0, (row ?? start + AROUND) - AROUND);
  return [first, Math.min(length, first + 2 * AROUND)];
}
