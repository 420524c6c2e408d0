/** Looks up the input, group and head that an address names, or says what is missing. */

import type { Group, Input, Picture, State } from './types';

export type Place = readonly [layer: number, head: number];
type Parameters = Readonly<Record<string, string>>;
/** Compare names two heads: the second by input2, group2, layer2 and head2. */
export type Side = '' | '2';

/** A name without a match; `input` and `group` are where it was looked for. */
export type Missing = { side: Side; asked: string } & (
  { what: 'input' } | { what: 'group'; input: Input } | { what: 'head'; input: Input; group: Group }
);

/** The heads of a group that can be opened, in reading order; a file may not hold all. */
export function headsOf(state: State | null, group: Group | null): Place[] {
  const inside = state?.static?.heads.filter((each) => each.group === group?.id);
  if (inside) {
    const heads = inside.map(({ layer, head }): Place => [layer, head]);
    return heads.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  }
  return (group?.layers ?? []).flatMap(({ layer, heads }) =>
    Array.from({ length: heads }, (_, head): Place => [layer, head]),
  );
}

/** The token of each cell of a picture, row by row; -1 where there is none. */
export function cellsOf({ grid: [down, across], runs }: Picture): Int32Array {
  const cells = new Int32Array(down * across).fill(-1);
  for (const [cell, token, count] of runs) {
    for (let step = 0; step < count; step++) cells[cell + step] = token + step;
  }
  return cells;
}

/** The first name in an address without a match; null if there is none. */
export function missing(parameters: Parameters, inputs: Input[], sides: Side[]): Missing | null {
  for (const side of sides) {
    const named = (name: string) => parameters[name + side] ?? (side && parameters[name]);
    const id = named('input');
    const input = id ? inputs.find((each) => each.id === id) : inputs.at(-1);
    if (!input) return { what: 'input', side, asked: id ?? '' };
    const kind = named('group');
    const group = kind ? input.groups.find((each) => each.id === kind) : input.groups.at(-1);
    if (!group) return { what: 'group', side, asked: kind ?? '', input };
    const first = String(group.layers[0]?.layer ?? 0);
    const asked = [parameters[`layer${side}`] ?? first, parameters[`head${side}`] ?? '0'];
    if (!isThere(group, asked)) {
      return { what: 'head', side, asked: asked.join('.'), input, group };
    }
  }
  return null;
}

function isThere({ layers }: Group, asked: string[]): boolean {
  if (!asked.every((text) => /^\d+$/.test(text))) return false;
  const [layer, head] = asked.map(Number);
  return layers.some((each) => each.layer === layer && head! < each.heads);
}
