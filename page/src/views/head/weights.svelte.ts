/** The exact weights of the chosen row or column of a map, for the text and the image to be coloured by. */

import type { Span } from '../../lib/colour';
import { Problem } from '../../lib/transport';
import type { OneHead } from './onehead.svelte';
import { spanFor } from './range';

export class LineOfWeights {
  weights = $state.raw<Float32Array | null>(null);
  problem = $state.raw<Problem | null>(null);
  readonly #one: () => OneHead;

  /** Follows the choices from now on; to be made while a component is. */
  constructor(one: () => OneHead) {
    this.#one = one;
    $effect(() => this.#follow());
  }

  /** The weights the colours span: evenly up to the largest of the line, left-out keys not counted. */
  readonly span: Span = $derived.by(() => {
    const { shape } = this.#one();
    let most = 0;
    for (const weight of this.weights ?? []) most = Math.max(most, weight);
    return spanFor('linear', most, shape.columns);
  });

  #follow(): (() => void) | void {
    const { choices, head, look } = this.#one();
    const { by, drop } = choices;
    const index = by === 'row' ? choices.row : choices.column;
    this.weights = null;
    this.problem = null;
    if (index === null) return;
    const controller = new AbortController();
    const ask = by === 'row' ? look.source.row : look.source.column;
    ask
      .call(look.source, head, index, controller.signal)
      .then((weights) => {
        if (controller.signal.aborted) return;
        this.weights = by === 'row' ? weights.fill(0, 0, drop) : weights;
      })
      .catch((error: unknown) => {
        if (controller.signal.aborted) return;
        this.problem = error instanceof Problem ? error : new Problem(String(error));
      });
    return () => controller.abort();
  }
}
