/** Entropy as a share of the most that the length allows: figures of a long and a short input. */

import type { Group, HeadFigures } from '../../lib/types';

/** The figure that this adds to those of the library. */
export const SHARE = 'entropy_share';

/** The mean over the rows of log(keys that a row may see): the entropy of even weights. */
export function mostEntropy({ causal, rows, columns }: Pick<Group, 'causal' | 'rows' | 'columns'>) {
  if (!causal) return Math.log(columns);
  let sum = 0;
  for (let row = 0; row < rows; row++) sum += Math.log(row + 1 + columns - rows);
  return sum / rows;
}

/** A head's figure; the share of entropy from its mean. */
export function figureOf(head: HeadFigures, name: string, group: Group | undefined): number | null {
  if (name !== SHARE) return head.figures[name] ?? null;
  const [entropy, most] = [head.figures.entropy_mean, group ? mostEntropy(group) : 0];
  return typeof entropy === 'number' && most > 0 ? entropy / most : null;
}
