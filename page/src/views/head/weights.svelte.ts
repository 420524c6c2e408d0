/** The weights of the chosen rows or columns of a map, for the text and the pictures to be coloured by. */

import type { Span } from '../../lib/colour';
import { Problem } from '../../lib/transport';
import type { Choices } from './choices.svelte';
import type { OneHead } from './onehead.svelte';
import { spanFor } from './range';

type Asked = Pick<Choices, 'by' | 'drop' | 'over' | 'chosen'>;

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

  /** What is asked for: as text it stays the same while other choices change. */
  readonly #asked = $derived.by(() => {
    const { choices } = this.#one();
    const { by, drop, over, chosen } = choices;
    return by === 'all' || chosen.length ? JSON.stringify({ by, drop, over, chosen }) : null;
  });

  #follow(): (() => void) | void {
    this.weights = null;
    this.problem = null;
    if (!this.#asked) return;
    const asked = JSON.parse(this.#asked) as Asked;
    const controller = new AbortController();
    this.#ask(asked, controller.signal)
      .then((weights) => {
        if (controller.signal.aborted) return;
        this.weights = asked.by === 'column' ? weights : weights.fill(0, 0, asked.drop);
      })
      .catch((error: unknown) => {
        if (controller.signal.aborted) return;
        this.problem = error instanceof Problem ? error : new Problem(String(error));
      });
    return () => controller.abort();
  }

  #ask({ by, chosen, over }: Asked, signal: AbortSignal): Promise<Float32Array> {
    const { head, look, shape } = this.#one();
    if (by !== 'all') return look.source.line(head, by, chosen, over, signal);
    // In a file there are as many as this; of a longer text several are one.
    const size = look.transport.kind === 'file' ? 1024 : Math.min(shape.columns, 8192);
    return look.source.strips(head, size, {}, signal).then(({ received }) => {
      const part = received.length / shape.columns;
      return Float32Array.from(
        { length: shape.columns },
        (_, at) => received[Math.floor(at * part)]!,
      );
    });
  }
}
