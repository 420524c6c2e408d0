/** An answer that is asked for again whenever what it depends on changes. */

import { Problem } from './transport';

export interface Loaded<Value> {
  /** The latest answer; it stays until the next one is here. */
  readonly value: Value | undefined;
  readonly problem: Problem | null;
}

/**
 * Ask inside a component. `ask` reads the state it depends on before its first await; null means
 * there is nothing to ask yet. An answer overtaken by the next question is dropped.
 */
export function loaded<Value>(ask: (signal: AbortSignal) => Promise<Value> | null): Loaded<Value> {
  let value = $state.raw<Value | undefined>();
  let problem = $state.raw<Problem | null>(null);
  $effect(() => {
    const control = new AbortController();
    ask(control.signal)?.then(
      (answer) => {
        if (control.signal.aborted) return;
        value = answer;
        problem = null;
      },
      (error: unknown) => {
        if (control.signal.aborted) return;
        problem = error instanceof Problem ? error : new Problem(String(error));
      },
    );
    return () => control.abort();
  });
  return {
    get value() {
      return value;
    },
    get problem() {
      return problem;
    },
  };
}
