/** The curves of a run: its loss, and the axes that show them with their thresholds. */

import { around, type Axis } from '../../charts/axis';
import type { Colour, Mark } from '../../charts/marks';
import type { Story } from '../../lib/types';
import { words } from '../../locales/watch';

/** The loss of a run, and the places where it was lowest and where it turned. */
export function lossMarks(story: Story | null, run: string, colour: Colour): Mark[] {
  if (!story?.loss) return [];
  const { points, turned } = story.loss;
  const known = points.filter((point): point is [number, number] => point[1] !== null);
  const marks: Mark[] = [{ kind: 'line', name: run, colour, points: known }];
  if (turned !== null && colour === 0)
    marks.push({ kind: 'moment', name: words().turned, x: turned, label: words().turned });
  return marks;
}

/** How far below its largest value a logarithmic axis reaches. */
const DEEPEST = 1e6;

/** An axis around the lines of a chart, and its threshold; logarithmic where that was asked for. */
export function figureAxis(
  marks: readonly Mark[],
  label: string,
  log: boolean,
  limit: number | null = null,
): Axis {
  const lines = marks.flatMap((mark) => (mark.kind === 'line' ? mark.points : []));
  const values = [...lines.map((point) => point[1]), ...(limit === null ? [] : [limit])];
  const positive = values.filter((value) => value > 0);
  if (!log || !positive.length) return around(values, label);
  const high = positive.reduce((most, value) => Math.max(most, value), 0);
  const low = positive.reduce((least, value) => Math.min(least, value), high);
  const power = (value: number, round: (x: number) => number) => 10 ** round(Math.log10(value));
  return {
    label,
    low: power(Math.max(low, high / DEEPEST), Math.floor),
    high: power(high, Math.ceil),
    log: 10,
  };
}
