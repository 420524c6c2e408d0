/** The tokens along both axes of a map, fetched in parts: the first are shown while others come. */

import type { Source } from '../../lib/source';
import type { Axis, Group } from '../../lib/types';
import { shown } from './lines';

const PART = 20_000;

export class Tokens {
  /** Replaced, not extended, as parts arrive: whatever shows tokens is drawn again. */
  #lists = $state.raw<Record<Axis, readonly string[]>>({ rows: [], columns: [] });
  readonly #square: boolean;
  /** True while some are still to come. */
  pending = $state(true);

  constructor(source: Source, input: string, group: Group) {
    this.#square = group.square;
    const axes: Axis[] = group.square ? ['rows'] : ['rows', 'columns'];
    const loads = axes.map((axis) => this.#load(source, input, group, axis));
    // The map works without them: numbers stand for tokens that did not come.
    void Promise.allSettled(loads).then(() => (this.pending = false));
  }

  /** The tokens of an axis that have arrived. */
  along(axis: Axis): readonly string[] {
    return this.#lists[this.#square ? 'rows' : axis];
  }

  /** A token as it is shown; empty until it arrives. */
  at(axis: Axis, index: number): string {
    const token = this.along(axis)[index];
    return token === undefined ? '' : shown(token);
  }

  async #load(source: Source, input: string, group: Group, axis: Axis): Promise<void> {
    let list: readonly string[] = [];
    while (list.length < group[axis]) {
      const stop = Math.min(group[axis], list.length + PART);
      const { tokens } = await source.tokens(input, group.id, axis, list.length, stop);
      if (tokens.length === 0) break;
      list = [...list, ...tokens];
      this.#lists = { ...this.#lists, [axis]: list };
    }
  }
}
