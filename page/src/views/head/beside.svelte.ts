/** The weights of the chosen token in several heads at once, for bands below the text. */

import { Problem } from '../../lib/transport';
import type { OneHead } from './onehead.svelte';

/** More colours are not told apart. */
export const MOST_HEADS = 5;

export interface Band {
  /** Layer and head. */
  name: string;
  colour: string;
  weights: Float32Array;
}

export class Bands {
  all = $state.raw<readonly Band[]>([]);
  problem = $state.raw<Problem | null>(null);
  readonly #one: () => OneHead;

  /** Follows the choices from now on; to be made while a component is. */
  constructor(one: () => OneHead) {
    this.#one = one;
    $effect(() => this.#follow());
  }

  /** The largest weight: it has the full colour. */
  readonly most = $derived.by(() => {
    let most = 0;
    for (const { weights } of this.all)
      for (const weight of weights) if (weight > most) most = weight;
    return most;
  });

  #follow(): (() => void) | void {
    const { choices, head, look } = this.#one();
    const { by, drop, beside, chosen } = choices;
    this.problem = null;
    if (by === 'all' || !chosen.length || !beside.length) {
      this.all = [];
      return;
    }
    const controller = new AbortController();
    const heads = [[head.layer, head.head] as const, ...beside];
    const asked = heads.map(async ([layer, number], order) => {
      const other = { ...head, layer, head: number };
      const found = await look.source.line(other, by, chosen, 'head', controller.signal);
      const weights = by === 'row' ? found.fill(0, 0, drop) : found;
      return { name: `${layer}.${number}`, colour: `var(--series-${order})`, weights };
    });
    Promise.all(asked)
      .then((all) => !controller.signal.aborted && (this.all = all))
      .catch((error: unknown) => {
        if (controller.signal.aborted) return;
        this.all = [];
        this.problem = error instanceof Problem ? error : new Problem(String(error));
      });
    return () => controller.abort();
  }
}
