/** The tokens along both axes of a map, fetched in parts: the first are here while the rest come. */

import type { Source } from '../../lib/source';
import type { Axis, Group } from '../../lib/types';
import { shown } from './lines';

const PART = 20_000;

export class Tokens {
  readonly #lists: Record<Axis, string[]>;
  /** Grows as parts arrive: whoever draws tokens draws them again. */
  version = $state(0);
  /** Whether some are still to come. */
  pending = $state(true);

  constructor(source: Source, input: string, group: Group) {
    const rows: string[] = [];
    this.#lists = { rows, columns: group.square ? rows : [] };
    const axes: Axis[] = group.square ? ['rows'] : ['rows', 'columns'];
    const loads = axes.map((axis) => this.#load(source, input, group, axis));
    // The map works without: numbers stand for the tokens that did not come.
    void Promise.allSettled(loads).then(() => (this.pending = false));
  }

  /** The tokens of an axis that are here. */
  along(axis: Axis): readonly string[] {
    return this.#lists[axis];
  }

  /** A token as it is shown, or nothing before it is here. */
  at(axis: Axis, index: number): string {
    void this.version; // whoever shows it shows it again when it comes
    const token = this.#lists[axis][index];
    return token === undefined ? '' : shown(token);
  }

  async #load(source: Source, input: string, group: Group, axis: Axis): Promise<void> {
    const list = this.#lists[axis];
    while (list.length < group[axis]) {
      const stop = Math.min(group[axis], list.length + PART);
      const { tokens } = await source.tokens(input, group.id, axis, list.length, stop);
      if (tokens.length === 0) break;
      for (const token of tokens) list.push(token);
      this.version++;
    }
  }
}
