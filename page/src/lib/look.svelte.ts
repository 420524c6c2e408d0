/** State that every view shares: the source, the route, and the server's state. */

import { createContext } from 'svelte';
import { missing, type Missing, type Side } from './lookup';
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
  /** The reason why the last request for the state failed. */
  stopped = $state.raw<Problem | null>(null);
  /** The element the page is shown in. */
  root: HTMLElement | undefined;
  /** The text in the window for a new input; it is kept until it has been read. */
  draft = $state('');
  #timer: ReturnType<typeof setTimeout> | undefined;
  #closed = false;
  #awaited: string | null = null;
  /** The input whose problem was dismissed. */
  #seen = $state<string | null>(null);

  constructor(
    readonly transport: Transport,
    address: Address = browserAddress,
  ) {
    this.source = new Source(transport);
    this.router = new Router(address);
    void this.refresh();
  }

  /** The input in the address, by default the newest; null if there is no such input. */
  get input(): Input | null {
    return named(this.state?.inputs ?? [], this.router.route.parameters.input);
  }

  /** The group in the address; of a translator, without one, how the target looks at the source. */
  get group(): Group | null {
    return named(this.input?.groups ?? [], this.router.route.parameters.group);
  }

  /** The name in the address of a view of heads that has no match, once something was read. */
  get missing(): Missing | null {
    const inputs = this.state?.inputs ?? [];
    const sides: Side[] = this.router.view === 'compare' ? ['', '2'] : [''];
    return inputs.length ? missing(this.router.route.parameters, inputs, sides) : null;
  }

  /** The reason why the last input could not be read, until it is dismissed. */
  get problem(): Problem | null {
    const told = this.state?.problem;
    return told && told.id !== this.#seen ? new Problem(told.error, told.hint) : null;
  }

  dismiss(): void {
    this.#seen = this.state?.problem?.id ?? null;
  }

  /** The kind of input that the model reads. */
  get reads(): 'text' | 'image' {
    if (this.input?.groups.some(({ pictures }) => pictures.length)) return 'image';
    if (this.input) return 'text';
    return this.state?.model?.reads ?? 'text';
  }

  /** A model is being loaded, or reads. */
  get busy(): boolean {
    return !this.state || this.state.state === 'loading' || this.state.stage !== null;
  }

  /**
   * True if a key is for a view: no window is open over it, wherever the focus is, no field has the
   * focus, and in a notebook the page has it.
   */
  hears(event: KeyboardEvent): boolean {
    const target = event.target as HTMLElement;
    if (this.root?.querySelector('dialog[open]')) return false;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return false;
    if (target.closest('input, textarea, select')) return false;
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
    if (arrived) {
      this.show(this.#awaited!);
      this.draft = '';
    }
    this.#awaited = null;
  }

  /** Look at another input: the same view; of the same tokens, such as in another step, all of it. */
  show(input: string): void {
    const { path, parameters } = this.router.route;
    const { group, layer, head, sort, x, y } = parameters;
    const alike = this.alike.some(({ id }) => id === input);
    this.router.go(
      path,
      alike ? { ...parameters, input } : { input, group, layer, head, sort, x, y },
    );
  }

  /** The inputs whose tokens are those of this one, if they are of pictures: the steps of a pipeline. */
  get alike(): Input[] {
    const shape = (input: Input) =>
      JSON.stringify(
        input.groups.map(({ id, rows, columns, pictures }) => [
          id,
          rows,
          columns,
          pictures.map(({ grid, runs }) => [grid, runs]),
        ]),
      );
    const own = this.input;
    if (!own?.groups.some(({ looks }) => looks === 'image')) return [];
    return (this.state?.inputs ?? []).filter((input) => shape(input) === shape(own));
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.router.close();
  }
}

/** The item of an id; the last one by default. */
function named<Item extends { id: string }>(items: Item[], wanted?: string): Item | null {
  return (wanted ? items.find((item) => item.id === wanted) : items.at(-1)) ?? null;
}

/** `useLook()` inside a component of the page; `provideLook` at its root. */
export const [useLook, provideLook] = createContext<Look>();
