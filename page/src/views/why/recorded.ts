/** The figures of the lab's grids that "Why" shows: claims/scale_atlas.py and claims/rivals_phase.py. */

import type { Claim, Result } from '../lab/answers';

/** A training of the atlas: scores are q·k / d_k^α. */
export interface Trained {
  task: string;
  length: number;
  width: number;
  /** The exponent α as a text, or "norm" or "swapped". */
  way: string;
  /** The factor on W_q and W_k at the start. */
  gain: number;
  rate: number;
  seed: number;
  /** At the end, in nats; null if it diverged. */
  loss: number | null;
  /** Of the logits within a row: before, early and after. */
  spread: (number | null)[];
  /** The largest weight of a row, a mean. */
  top: (number | null)[];
}

/** The share of right answers of a rival with so many pairs, so far away. */
export interface Recalled {
  kind: string;
  budget: number;
  pairs: number;
  distance: number;
  right: number;
}

/** A rival of one size. */
export interface Sized {
  kind: string;
  budget: number;
  parameters: number;
  state: number;
  /** Forward, per token. */
  flops: number;
}

export interface AtlasFigures {
  steps: number;
  rows: Trained[];
}

export interface PhaseFigures {
  steps: number;
  rows: Recalled[];
  sizes: Sized[];
}

/** The best result whose figures are of today's experiment. */
export function current(claim: Claim | undefined): Result | undefined {
  return claim?.results.find(({ stale }) => !stale);
}

/** The different values of rows, in order. */
export function stops<Row, Value extends string | number>(
  rows: readonly Row[],
  of: (row: Row) => Value,
): Value[] {
  return [...new Set(rows.map(of))].sort((one, two) => (one < two ? -1 : 1));
}

/** The mean of what there is; null of nothing, or if a training has diverged. */
export function mean(values: readonly (number | null | undefined)[]): number | null {
  if (!values.length || values.some((value) => typeof value !== 'number')) return null;
  return values.reduce((sum: number, value) => sum + value!, 0) / values.length;
}
