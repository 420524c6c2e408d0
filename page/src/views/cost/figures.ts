/** The table of a cost's figures, named in the language of the page. */

import { written } from '../../lib/language.svelte';
import { words } from '../../locales/cost';
import type { CostAnswer } from './answers';

const LARGE: [number, string][] = [
  [1e15, 'P'],
  [1e12, 'T'],
  [1e9, 'G'],
  [1e6, 'M'],
  [1e3, 'k'],
];
const SMALL: [number, string][] = [
  [1, ''],
  [1e-3, 'm'],
  [1e-6, 'µ'],
  [1e-9, 'n'],
];

/** A number in three digits with a prefix: 8.03 G, 1.07 GB. */
export function scaled(value: number, unit = ''): string {
  const [scale, prefix] = LARGE.find(([scale]) => value >= scale) ?? [1, ''];
  return `${digits(value / scale)} ${prefix}${unit}`.trim();
}

/** A time: 7.7 ms. */
export function duration(seconds: number): string {
  const [scale, prefix] = SMALL.find(([scale]) => seconds >= scale) ?? SMALL[3]!;
  return `${digits(seconds / scale)} ${prefix}s`;
}

function digits(value: number): string {
  return written(Number(value.toPrecision(3)));
}

export function figures(answer: CostAnswer['found'], training: boolean) {
  const { figures: found, longest, positions, curve } = answer;
  const w = words();
  const kept = training ? found.activations : found.kv_cache;
  const row = (id: string, name: string, value: string, beside = w.notes[id] ?? '') => ({
    id,
    name,
    value,
    beside,
  });
  return [
    row('params', w.figures.params, scaled(found.params)),
    row('weights', w.figures.weights, scaled(found.weights, 'B')),
    row(
      'kept',
      training ? w.figures.saved : w.figures.cache,
      scaled(kept ?? 0, 'B'),
      training ? w.notes.saved : w.notes.cache,
    ),
    ...(found.kv_cache_per_token
      ? [row('per_token', w.figures.perToken, scaled(found.kv_cache_per_token, 'B'))]
      : []),
    row('memory', w.figures.memory, scaled(found.memory, 'B')),
    // A model that always has its own tokens, such as the patches of an image, has no longest.
    ...(curve.length
      ? [
          row(
            'longest',
            w.figures.longest,
            longest === null ? w.none : written(longest),
            longest !== null && longest === positions ? w.noMorePositions : undefined,
          ),
        ]
      : []),
    row('flops', w.figures.flops, scaled(found.flops)),
    row('dense', w.figures.dense, scaled(found.flops_dense)),
    row('special', w.figures.special, scaled(found.special)),
    row('intensity', w.figures.intensity, scaled(found.intensity)),
    row('seconds', w.figures.seconds, duration(found.seconds)),
    row('speed', w.figures.speed, scaled(found.tokens_per_second)),
    row('utilisation', w.figures.utilisation, `${digits(100 * found.utilisation)} %`),
  ];
}
