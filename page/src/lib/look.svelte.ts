/** What every view shares: the source, the route, and the state of the server behind them. */

import { createContext } from 'svelte';
import { Router, browserAddress, type Address } from './router.svelte';
import { Source } from './source';
import { Problem, type Transport } from './transport';
import type { Group, Input, State } from './types';

const WHILE_LOADING = 300;
const AFTERWARDS = 3_000;

export class Look {
  readonly source: Source;
  readonly router: Router;
  state = $state.raw<State | null>(null);
  /** Why the last question about the state had no answer. */
  stopped = $state.raw<Problem | null>(null);
  /** The element the page is shown in. */
  root: HTMLElement | undefined;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #closed = false;
  #awaited: string | null = null;

  constructor(
    readonly transport: Transport,
    address: Address = browserAddress,
  ) {
    this.source = new Source(transport);
    this.router = new Router(address);
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

  /** A model is being loaded, or reads. */
  get busy(): boolean {
    return !this.state || this.state.state === 'loading' || this.state.stage !== null;
  }

  /** Whether a key is for a view: nobody is typing, and in a notebook the page has the focus. */
  hears(event: KeyboardEvent): boolean {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    if (target.closest('input, textarea, select, dialog')) return false;
    return this.transport.kind !== 'widget' || this.root?.contains(target) === true;
  }

  /** Ask for the state now, and again later: often while something happens, seldom afterwards. */
  async refresh(): Promise<void> {
    clearTimeout(this.#timer);
    try {
      const state = await this.source.state();
      if (this.stopped) this.source.forget();
      // An unchanged state stays the same object: nothing that depends on it is drawn again.
      if (JSON.stringify(state) !== JSON.stringify(this.state)) this.state = state;
      this.stopped = null;
      if (this.#awaited) this.#showAwaited();
    } catch (error) {
      this.stopped = error instanceof Problem ? error : new Problem(String(error));
    }
    if (this.#closed || this.transport.kind === 'file') return;
    this.#timer = setTimeout(() => void this.refresh(), this.busy ? WHILE_LOADING : AFTERWARDS);
  }

  /** Let the model read a text or an image; it is shown when it has been read. */
  async add(what: string | Blob): Promise<void> {
    this.#awaited = (await this.source.add(what)).id;
    await this.refresh();
  }

  #showAwaited(): void {
    const arrived = this.state?.inputs?.some((input) => input.id === this.#awaited);
    if (!arrived && this.busy) return;
    if (arrived) this.show(this.#awaited!);
    this.#awaited = null;
  }

  /** Look at another input: the same view, but none of the first one's positions. */
  show(input: string): void {
    const { path, parameters } = this.router.route;
    const { group, layer, head, sort, x, y } = parameters;
    this.router.go(path, { input, group, layer, head, sort, x, y });
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.router.close();
  }
}

/** `useLook()` inside a component of the page; `provideLook` at its root. */
export const [useLook, provideLook] = createContext<Look>();
