/** Heads of a run by name, and the numbers of a series by head. */

import type { Chapter, Series, WatchState } from '../../lib/types';

export interface Place {
  layer: number;
  head: number;
}

/** 5.1 is the second head of the sixth layer, as everywhere in headwise. */
export function nameOf({ layer, head }: Place): string {
  return `${layer}.${head}`;
}

/** The heads of some alarms. */
export function namesOf(chapter: Chapter): string[] {
  return chapter.heads.flatMap(({ head }) =>
    head === null || chapter.layer === null ? [] : [nameOf({ layer: chapter.layer, head })],
  );
}

/** The heads that an address names, as far as the run has them. */
export function placesOf(text: string, layers: WatchState['layers']): Place[] {
  return text.split(',').flatMap((name) => {
    const [layer, head] = name.split('.').map(Number);
    const there = layers.find((each) => each.layer === layer);
    return there && head !== undefined && head >= 0 && head < there.heads
      ? [{ layer: there.layer, head }]
      : [];
  });
}

/** One head's numbers over the steps; `row` is the layer's place among the layers. */
export function pathOf(series: Series, row: number, head: number): [number, number][] {
  return series.steps.flatMap((step, index): [number, number][] => {
    const value = series.values[index]?.[row]?.[head] ?? null;
    return value === null ? [] : [[step, value]];
  });
}

/** The smallest and the largest number of some steps; loops, for there may be a million. */
export function extent(values: Series['values']): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const layers of values)
    for (const heads of layers)
      for (const value of heads) {
        if (value === null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
  return low <= high ? [low, high] : [0, 1];
}

/** The place of the last step that is not after `step`; the last of all for null. */
export function indexOf(steps: number[], step: number | null): number {
  if (step === null) return steps.length - 1;
  const after = steps.findIndex((each) => each > step);
  return after < 0 ? steps.length - 1 : Math.max(0, after - 1);
}
