/** The choices of the view of one head; all are in the address, so a link shows the same. */

import type { Scale } from '../../lib/colour';
import type { Look } from '../../lib/look.svelte';
import { cellsOf, headsOf } from '../../lib/lookup';
import type { Changes } from '../../lib/router.svelte';
import type { HeadAddress, HeadPlace, How, Over } from '../../lib/types';
import { MOST_HEADS } from './beside.svelte';
import type { Place } from './view';

/** A chosen token's row of the map, its column, or what each key receives from all rows. */
export type By = 'row' | 'column' | 'all';
export type Side = 'text' | 'lines' | 'image' | 'spans';

export interface Region {
  readonly picture: number;
  readonly tokens: readonly number[];
}

/** Up to this many keys, colours are linear by default. */
const FEW = 64;

/** The numbers of first keys that can be left out. */
export const DROPS = [0, 1, 4] as const;

export class Choices {
  readonly #look: Look;
  /** The head to open where the address names none; null until it is known. */
  start = $state.raw<readonly [number, number] | null>(null);

  constructor(look: Look) {
    this.#look = look;
  }

  /** The heads of the group that can be opened, as [layer, head]; a file may not hold all. */
  get heads(): readonly (readonly [number, number])[] {
    return headsOf(this.#look.state, this.#look.group);
  }

  /** The head, by default the most remarkable one of its group, as among all heads. */
  get head(): HeadAddress | null {
    const { input, group, router } = this.#look;
    if (!input || !group) return null;
    const named = ['layer', 'head'].every((name) => name in router.route.parameters);
    if (!named && !this.start) return null;
    const [layer, head] = this.start ?? [0, 0];
    return {
      input: input.id,
      group: group.id,
      layer: router.number('layer', layer),
      head: router.number('head', head),
    };
  }

  /** The head `by` steps on in reading order; null past the ends. */
  neighbour(by: number): readonly [number, number] | null {
    const { heads, head } = this;
    const here = heads.findIndex(
      ([layer, number]) => layer === head?.layer && number === head.head,
    );
    return here < 0 ? null : (heads[here + by] ?? null);
  }

  /** The number of levels of the open head's map; a file may not hold all. */
  get levels(): number {
    const { head } = this;
    if (this.of !== null) return this.#look.transport.kind === 'file' ? 1 : Infinity;
    const inside = this.#look.state?.static?.heads.find((each) => samePlace(each, head));
    return inside?.levels ?? Infinity;
  }

  get how(): How {
    return this.#text('how') === 'max' ? 'max' : 'mean';
  }

  /** Few tokens are read weight by weight; of many, the small weights are the picture. */
  get scale(): Scale {
    const scale = this.#text('scale');
    if (scale === 'linear' || scale === 'log') return scale;
    return (this.#look.group?.columns ?? 0) <= FEW ? 'linear' : 'log';
  }

  /** The row whose prediction the map is coloured by: by effects; null: by weights. */
  get of(): number | null {
    const row = this.#look.router.number('of', NaN);
    return this.#explained(row) ? row : null;
  }

  /** There are predictions to colour the map by. */
  get explained(): boolean {
    return this.of !== null || this.#explained(this.lastOf);
  }

  /** A file has maps of effects of a few heads. */
  #explained(row: number): boolean {
    if (!Number.isInteger(row) || row < 0 || row >= this.#predicted) return false;
    return this.#look.transport.kind !== 'file' || this.#recorded.includes(row);
  }

  /** The rows whose predictions a file's map of the open head may be coloured by. */
  get #recorded(): number[] {
    return (this.#look.state?.static?.effects ?? [])
      .filter((each) => samePlace(each, this.head))
      .map((each) => each.row);
  }

  /** The row whose prediction is explained unless another one is named: the last one there is. */
  get lastOf(): number {
    const file = this.#look.transport.kind === 'file';
    return file ? Math.max(-1, ...this.#recorded) : this.#predicted - 1;
  }

  get #predicted(): number {
    const group = this.#look.input?.groups.at(-1);
    return group?.predicts ? group.rows : 0;
  }

  get drop(): number {
    return Math.max(0, Math.floor(this.#look.router.number('drop', 0)));
  }

  /** The drop after this one, and then none again. */
  get nextDrop(): number {
    return DROPS[(DROPS.findIndex((drop) => drop === this.drop) + 1) % DROPS.length]!;
  }

  /** What the text and the pictures are coloured by. */
  get by(): By {
    const by = this.#text('by');
    return by === 'column' || by === 'all' ? by : 'row';
  }

  /** The heads whose mean colours the pictures; a file has one. */
  get over(): Over {
    const over = this.#text('over');
    const many = this.side === 'image' && this.#look.transport.kind !== 'file';
    return many && (over === 'layer' || over === 'all') ? over : 'head';
  }

  /** The tokens whose rows or columns are shown: one, or those of a part of a picture. */
  get chosen(): readonly number[] {
    const one = this.by === 'row' ? this.row : this.column;
    if (one !== null) return [one];
    const { group } = this.#look;
    if (this.side !== 'image' || !group) return [];
    if (this.region) return this.region.tokens;
    return this.by === 'row' && group.looks === 'text' ? [group.rows - 1] : [];
  }

  /** The chosen part of a picture: its number, and from which cell to which. */
  get region(): Region | null {
    const [picture, ...box] = this.#text('region').split('.').map(Number);
    const [top, left, bottom, right] = box as [number, number, number, number];
    const found = this.#look.group?.pictures[picture!];
    if (!found || box.length !== 4 || !(top <= bottom) || !(left <= right)) return null;
    const cells = cellsOf(found);
    const [down, across] = found.grid;
    const tokens: number[] = [];
    for (let y = Math.max(0, top); y <= Math.min(down - 1, bottom); y++) {
      for (let x = Math.max(0, left); x <= Math.min(across - 1, right); x++) {
        const token = cells[y * across + x]!;
        if (token >= 0) tokens.push(token);
      }
    }
    const along = this.by === 'column' ? 'columns' : 'rows';
    const there = found.axis === 'both' || found.axis === along;
    return there && tokens.length ? { picture: picture!, tokens } : null;
  }

  get side(): Side {
    const side = this.#text('side');
    const image = Boolean(this.#look.group?.pictures.length);
    if (side === 'text' || side === 'lines') return side;
    if (side === 'spans' && this.#look.transport.kind !== 'file') return side;
    return image ? 'image' : 'text';
  }

  /** Heads whose weights are shown below the text beside those of the open one. */
  get beside(): readonly (readonly [number, number])[] {
    const { head } = this;
    const named = this.#text('beside').split(',');
    return this.heads
      .filter(([layer, number]) => named.includes(`${layer}.${number}`))
      .filter(([layer, number]) => layer !== head?.layer || number !== head.head)
      .slice(0, MOST_HEADS - 1);
  }

  get row(): number | null {
    return this.#token('row', this.#look.group?.rows ?? 0);
  }

  get column(): number | null {
    return this.#token('column', this.#look.group?.columns ?? 0);
  }

  /** The first and, not included, the last row whose lines are drawn. */
  get span(): { from: number | null; to: number | null } {
    const rows = this.#look.group?.rows ?? 0;
    return { from: this.#token('from', rows), to: this.#token('to', rows + 1) };
  }

  /** The first and the last key of the span that is weighed; by default the chosen key. */
  get keys(): { first: number; last: number } {
    const columns = this.#look.group?.columns ?? 0;
    const first = this.#token('first', columns) ?? this.column ?? 0;
    return { first, last: Math.max(first, this.#token('last', columns) ?? first) };
  }

  /** The part of the map in sight, or null for the whole. */
  get place(): Place | null {
    const { router } = this.#look;
    const [zoom, x, y] = ['zoom', 'x', 'y'].map((name) => router.number(name, NaN));
    return zoom! > 1 && x! >= 0 && y! >= 0 ? { zoom: zoom!, x: x!, y: y! } : null;
  }

  /** Write a choice into the address; null takes it out. */
  set(changes: Changes): void {
    this.#look.router.set(changes);
  }

  /** Choose nothing. */
  clear(): void {
    this.set({ row: null, column: null, region: null, from: null, to: null });
  }

  /** Rounded to less than a tenth of a pixel: the view follows the address without a visible step. */
  setPlace(place: Place | null): void {
    const short = (value: number, digits: number) => Number(value.toFixed(digits));
    this.set({
      zoom: place && short(place.zoom, 4),
      x: place && short(place.x, 3),
      y: place && short(place.y, 3),
    });
  }

  #text(name: string): string {
    return this.#look.router.text(name, '');
  }

  #token(name: string, length: number): number | null {
    const value = this.#look.router.number(name, NaN);
    return Number.isInteger(value) && value >= 0 && value < length ? value : null;
  }
}

function samePlace(one: HeadPlace, other: HeadPlace | null): boolean {
  return one.group === other?.group && one.layer === other.layer && one.head === other.head;
}
