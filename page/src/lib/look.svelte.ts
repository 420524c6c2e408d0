/** What every view shares: the source, the route, and the state of the server behind them. */

import { createContext } from 'svelte';
import { Router } from './router.svelte';
import { Source } from './source';
import { Problem, type Transport } from './transport';
import type { Group, Input, State } from './types';

const WHILE_LOADING = 300;
const AFTERWARDS = 5_000;

export class Look {
  readonly source: Source;
  readonly router: Router;
  state = $state.raw<State | null>(null);
  /** Why the last question about the state had no answer. */
  stopped = $state.raw<Problem | null>(null);
  #timer: ReturnType<typeof setTimeout> | undefined;
  #closed = false;

  constructor(readonly transport: Transport) {
    this.source = new Source(transport);
    this.router = new Router(transport.kind !== 'widget');
    void this.refresh();
  }

  /** The input in the address, or the newest. */
  get input(): Input | null {
    const inputs = this.state?.inputs ?? [];
    const wanted = this.router.route.parameters.input;
    return inputs.find((input) => input.id === wanted) ?? inputs.at(-1) ?? null;
  }

  /** The group in the address, or, of a translator, how the target looks at the source. */
  get group(): Group | null {
    const groups = this.input?.groups ?? [];
    const wanted = this.router.route.parameters.group;
    return groups.find((group) => group.id === wanted) ?? groups.at(-1) ?? null;
  }

  /** Ask for the state now, and again later: often while something happens, seldom afterwards. */
  async refresh(): Promise<void> {
    clearTimeout(this.#timer);
    try {
      this.state = await this.source.state();
      this.stopped = null;
    } catch (error) {
      this.stopped = error instanceof Problem ? error : new Problem(String(error));
    }
    if (this.#closed || this.transport.kind === 'file') return;
    const busy = !this.state || this.state.state === 'loading';
    this.#timer = setTimeout(() => void this.refresh(), busy ? WHILE_LOADING : AFTERWARDS);
  }

  /** Let the model read a text or an image, and show it when it has been read. */
  async add(what: string | Blob): Promise<void> {
    const { id } = await this.source.add(what);
    await this.refresh();
    const { path, parameters } = this.router.route;
    this.router.go(path, { ...parameters, input: id });
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.router.close();
  }
}

/** `useLook()` inside a component of the page; `provideLook` at its root. */
export const [useLook, provideLook] = createContext<Look>();
