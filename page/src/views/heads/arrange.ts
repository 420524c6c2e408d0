/** Filters and sorts the heads. */

import type { Place } from '../../lib/lookup';
import type { GroupId, HeadFigures } from '../../lib/types';
import { figure, headType } from '../../locales/statistics';

export type Order = 'layers' | 'rising' | 'falling';

/** Layer and number: how a head is called everywhere in headwise. */
export function nameOf(head: { layer: number; head: number }): string {
  return `${head.layer}.${head.head}`;
}

/** The heads in order of a figure; those without one come last, in either direction. */
export function sorted(heads: readonly HeadFigures[], by: string, order: Order): HeadFigures[] {
  const copy = [...heads];
  if (order === 'layers') return copy.sort((a, b) => a.layer - b.layer || a.head - b.head);
  const sign = order === 'rising' ? 1 : -1;
  return copy.sort((a, b) => {
    const [one, other] = [a.figures[by] ?? null, b.figures[by] ?? null];
    if (one === null || other === null) return Number(one === null) - Number(other === null);
    return sign * (one - other);
  });
}

/** The figures that say most about a head, in the order to read them. */
const TELLING = [
  'entropy_mean',
  'effective_keys_mean',
  'distance_mean',
  'patch_distance_mean',
  'sink_mass_mean',
  'self_mass_mean',
  'previous_mass_mean',
  'induction_mean',
  'max_logit_max',
];

/** The figures to show first, and the others; both in the order of their meaning. */
export function telling(columns: readonly string[]): [first: string[], rest: string[]] {
  const exact = (name: string) => name.replace(/_(lower|upper)_bound$/, '');
  const first = TELLING.flatMap((name) => columns.filter((each) => exact(each) === name));
  return [first, columns.filter((name) => !first.includes(name))];
}

/** The types to show a newcomer, the most remarkable first. */
const REMARKABLE = ['induction', 'previous-token', 'local', 'sink', 'self', 'content', 'uniform'];

/** A few heads worth a look: the clearest of each type, the most remarkable first, then others. */
export function examples(heads: readonly HeadFigures[], most = 3): HeadFigures[] {
  const clarity = (head: HeadFigures) => head.score ?? -(head.figures.entropy_mean ?? 0);
  const clear = [...heads].sort((a, b) => clarity(b) - clarity(a));
  const firsts = REMARKABLE.flatMap((type) => clear.find((head) => head.type === type) ?? []);
  return [...firsts, ...clear.filter((head) => !firsts.includes(head))].slice(0, most);
}

/** The heads of a group that have a map: the clearest of each type first. */
export function openable(heads: readonly HeadFigures[], maps: readonly Place[], group: GroupId) {
  const names = new Set(maps.map((place) => place.join('.')));
  const found = heads.filter((head) => head.group === group && names.has(nameOf(head)));
  const others = maps.map(([layer, head]) => ({ layer, head, type: null }));
  return [...examples(found, Infinity), ...others];
}

/** The smallest and the largest of a figure. */
export function rangeOf(heads: readonly HeadFigures[], by: string): [number, number] {
  const values = heads.map((head) => head.figures[by]).filter((value) => typeof value === 'number');
  return values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
}

/** Relative differences below this are rounding. */
const EQUAL = 1e-5;

/** Where a value lies in a range: 0 to 1; null where there is no value, or all are equal. */
export function share(value: number | null | undefined, [low, high]: [number, number]) {
  if (value === null || value === undefined) return null;
  if (high - low <= EQUAL * Math.max(Math.abs(low), Math.abs(high))) return null;
  return (value - low) / (high - low);
}

/** A filter that was understood, or the word that was not. */
export interface Filter {
  passes(head: HeadFigures): boolean;
  unknown: string | null;
}

type Test = (head: HeadFigures) => boolean;

const COMPARE: Record<string, (one: number, other: number) => boolean> = {
  '<': (one, other) => one < other,
  '>': (one, other) => one > other,
};

/**
 * The filter as typed: `5` is a layer, `5.1` a head (several are any of them), `entropy<2` a figure,
 * and any other word part of a type's name.
 */
export function parseFilter(text: string, columns: string[], types: (string | null)[]): Filter {
  const [places, others]: [Test[], Test[]] = [[], []];
  let unknown: string | null = null;
  for (const word of text
    .toLowerCase()
    .split(/[\s,，]+/)
    .filter(Boolean)) {
    const place = /^l?(\d+)(?:\.h?(\d+))?$/.exec(word);
    const condition = /^(.+?)([<>])(-?[\d.]+(?:e-?\d+)?)$/.exec(word);
    if (place) {
      const [layer, number] = [Number(place[1]), place[2] && Number(place[2])];
      places.push((head) => head.layer === layer && (!number?.toString() || head.head === number));
    } else if (condition) {
      const column = columns.find((name) => called(name, condition[1]!));
      if (!column) unknown ??= condition[1]!;
      const [compare, bound] = [COMPARE[condition[2]!]!, Number(condition[3])];
      others.push((head) => compare(head.figures[column ?? ''] ?? NaN, bound));
    } else {
      if (!types.some((type) => typeMatches(type, word))) unknown ??= word;
      others.push((head) => typeMatches(head.type, word));
    }
  }
  return {
    passes: (head) =>
      (!places.length || places.some((test) => test(head))) && others.every((test) => test(head)),
    unknown,
  };
}

/** A figure may be typed by its name in the library or on the page, without spaces, or their start. */
function called(name: string, typed: string): boolean {
  const plain = (text: string) => text.toLowerCase().replaceAll(/[\s_-]/g, '');
  const wanted = plain(typed);
  return [name, figure(name).name].some((each) => plain(each).startsWith(wanted));
}

function typeMatches(type: string | null, word: string): boolean {
  return type !== null && [type, headType(type)].some((name) => name.toLowerCase().includes(word));
}
