/** State that the parts of the view share: the head, its tokens, and the pointed cell. */

import type { Span } from '../../lib/colour';
import type { Look } from '../../lib/look.svelte';
import type { Problem } from '../../lib/transport';
import type { Group, HeadAddress, Input, MapShape, Pooling } from '../../lib/types';
import type { Pointed } from './chart';
import type { Choices } from './choices.svelte';
import type { Tokens } from './tokens.svelte';

/** A head that is open: it stays itself while the choices about it change. */
export class OneHead {
  /** The cell under the cursor. */
  pointed = $state.raw<Pointed | null>(null);
  /** The row and the column of the token under the cursor in the text. */
  markedRow = $state<number | null>(null);
  markedColumn = $state<number | null>(null);
  /** The weights that the colours of the map span now. */
  span = $state.raw<Span | null>(null);
  /** Tokens along each side of a cell, and the magnification. */
  cell = $state(1);
  zoom = $state(1);
  /** The rows in sight: the first, and the one after the last. */
  rowsInSight = $state.raw<readonly [number, number]>([0, 0]);
  busy = $state(true);
  /** The reason why a visible part of the map is missing. */
  problem = $state.raw<Problem | null>(null);
  /** The file does not hold the level needed here. */
  ended = $state(false);
  /** The number of retries. */
  attempts = $state(0);

  constructor(
    readonly look: Look,
    readonly choices: Choices,
    readonly input: Input,
    readonly group: Group,
    readonly head: HeadAddress,
    readonly shape: MapShape,
    readonly tokens: Tokens,
  ) {}

  get pooling(): Pooling {
    const { how, drop, of } = this.choices;
    return of === null ? { how, drop } : { how: 'max', drop: 0, of };
  }

  setSpan(span: Span): void {
    if (JSON.stringify(span) !== JSON.stringify(this.span)) this.span = span;
  }

  setRowsInSight(first: number, last: number): void {
    const [start, stop] = this.rowsInSight;
    if (first !== start || last !== stop) this.rowsInSight = [first, last];
  }

  /** Ask again for what could not be loaded. */
  retry(): void {
    this.attempts++;
  }

  /** The finest level there is. */
  get deepest(): number {
    return Math.min(this.shape.levels, this.choices.levels) - 1;
  }

  /** Choose a row and a key: the text and the lines follow. */
  choose(row: number | null, column: number | null): void {
    this.choices.set({ row, column });
  }
}
