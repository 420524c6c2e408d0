/** An axis of a plot: where numbers lie on it, and which of them are written. */

export interface Axis {
  low: number;
  high: number;
  ticks: number[];
}

/** An axis around some numbers, with about as many round ticks as asked for. */
export function axisAround(values: readonly number[], count = 5): Axis {
  const finite = values.filter(Number.isFinite);
  if (!finite.length) return { low: 0, high: 1, ticks: [0, 1] };
  let [low, high] = [Math.min(...finite), Math.max(...finite)];
  if (low === high) [low, high] = [low - Math.abs(low) / 2 - 0.5, high + Math.abs(high) / 2 + 0.5];
  const margin = (high - low) * 0.04;
  const step = roundStep((high - low) / count);
  // Nothing below zero where nothing is: most figures are masses, counts and sizes.
  low = low >= 0 && low < margin * 4 ? Math.min(0, low) : low - margin;
  high += margin;
  const ticks = [];
  for (let tick = Math.ceil(low / step); tick * step <= high; tick++) {
    ticks.push(Number((tick * step).toPrecision(12)));
  }
  return { low, high, ticks };
}

/** The smallest of 1, 2, 5 × 10ⁿ that is no smaller than this. */
function roundStep(step: number): number {
  const power = 10 ** Math.floor(Math.log10(step));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= step * 0.999)!;
}

/** Where a number lies between the ends of an axis: 0 to 1. */
export function along({ low, high }: Axis, value: number): number {
  return (value - low) / (high - low);
}
