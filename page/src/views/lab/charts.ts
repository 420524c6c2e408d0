/** Charts of the lab as axes and marks, and as tables of numbers. */

import { around, type Axis } from '../../charts/axis';
import type { Colour, Mark } from '../../charts/marks';
import { said } from '../../lib/translations';
import type { Cell, Chart, Table } from './answers';

/** One pattern for each colour: where curves coincide, those below show through the gaps. */
const DASHES = ['', '7 4', '2 4', '9 4 2 4', '4 4', '12 5', '1 3'];

/** An axis around some values; a logarithmic one has no place for what is not positive. */
function axis(values: number[], label: string, log: boolean, base: 2 | 10): Axis {
  if (!log) return around(values, label);
  const positive = values.filter((value) => value > 0);
  if (!positive.length) return { label, low: 0.1, high: 1, log: base };
  const [least, most] = [Math.min(...positive), Math.max(...positive)];
  if (base === 2 && least < most) return { label, low: least, high: most, log: base };
  const [first, last] = [Math.floor(Math.log10(least)), Math.ceil(Math.log10(most))];
  // Within a decade powers of ten would be too few ticks.
  const narrow = most / least < 30;
  const low = narrow ? least / 1.3 : 10 ** first;
  const high = narrow ? most * 1.3 : 10 ** last;
  return { label, low, high, log: narrow ? 2 : 10 };
}

export function axes({ series, x, y, log_x, log_y }: Chart): { x: Axis; y: Axis } {
  const heights = series.flatMap((curve) => [
    ...curve.y,
    ...(curve.low ?? []),
    ...(curve.high ?? []),
  ]);
  const places = series.flatMap((curve) => curve.x);
  return {
    x: axis(places, said(x), log_x, 2),
    y: axis(heights, said(y), log_y, 10),
  };
}

/** The curves, each above the band of its interval. */
export function marks({ series }: Chart): Mark[] {
  return series.flatMap((curve, number): Mark[] => {
    const colour = (number % DASHES.length) as Colour;
    const line: Mark = {
      kind: 'line',
      name: said(curve.label),
      colour,
      points: curve.x.map((x, at): [number, number] => [x, curve.y[at]!]),
      dots: true,
      dashed: DASHES[colour],
    };
    const { low, high } = curve;
    if (!low || !high) return [line];
    const points = curve.x.map((x, at): [number, number, number] => [x, low[at]!, high[at]!]);
    return [{ kind: 'band', name: '', colour, points }, line];
  });
}

/** The numbers of a chart: one row per place, one column per curve. */
export function asTable({ title, x, series }: Chart): Table {
  const places = [...new Set(series.flatMap((curve) => curve.x))].sort((one, two) => one - two);
  const rows = places.map((place): Cell[] => [
    place,
    ...series.map((curve) => curve.y[curve.x.indexOf(place)] ?? null),
  ]);
  return { kind: 'table', title, headings: [x, ...series.map(({ label }) => label)], rows };
}
