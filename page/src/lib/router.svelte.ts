/** Where we are: `#/head?input=0&layer=3` in the address, so that a link leads back to the view. */

export interface Route {
  /** heads, head, compare, why/scale, watch … */
  path: string;
  parameters: Readonly<Record<string, string>>;
}

export type Changes = Record<string, string | number | boolean | null | undefined>;

const START: Route = { path: 'heads', parameters: {} };

export class Router {
  route = $state.raw<Route>(START);

  /** In a notebook there is no address of ours: there the route lives in memory. */
  constructor(readonly addressed: boolean) {
    if (!addressed) return;
    this.#read();
    addEventListener('hashchange', this.#read);
  }

  /** The first part of the path: which view is shown. */
  get view(): string {
    return this.route.path.split('/')[0]!;
  }

  /** A parameter as text, or what to take without one. */
  text(name: string, otherwise: string): string {
    return this.route.parameters[name] ?? otherwise;
  }

  /** A parameter as a number, or what to take where there is none. */
  number(name: string, otherwise: number): number {
    const value = Number(this.route.parameters[name] ?? NaN);
    return Number.isNaN(value) ? otherwise : value;
  }

  /** Go to a view: a new step for the browser's back button. */
  go(path: string, parameters: Changes = {}): void {
    this.#show({ path, parameters: cleaned(parameters) }, 'pushState');
  }

  /** Change parameters in place: null removes one. The back button leads past such changes. */
  set(changes: Changes): void {
    const parameters = cleaned({ ...this.route.parameters, ...changes });
    this.#show({ path: this.route.path, parameters }, 'replaceState');
  }

  /** The address of a view, for links that open in a new tab too. */
  link(path: string, parameters: Changes = {}): string {
    return addressOf({ path, parameters: cleaned(parameters) });
  }

  close(): void {
    removeEventListener('hashchange', this.#read);
  }

  #show(route: Route, how: 'pushState' | 'replaceState'): void {
    if (this.addressed) history[how](null, '', addressOf(route));
    this.route = route;
  }

  #read = (): void => {
    this.route = parse(location.hash);
  };
}

/** The route a hash names; the start for an empty one. */
export function parse(hash: string): Route {
  const [path, query] = hash.replace(/^#\/?/, '').split('?', 2);
  if (!path) return START;
  return { path, parameters: Object.fromEntries(new URLSearchParams(query ?? '')) };
}

function addressOf({ path, parameters }: Route): string {
  const query = new URLSearchParams(parameters).toString();
  return query ? `#/${path}?${query}` : `#/${path}`;
}

function cleaned(changes: Changes): Record<string, string> {
  const given = Object.entries(changes).filter(
    ([, value]) => value !== null && value !== undefined && value !== '',
  );
  return Object.fromEntries(given.map(([name, value]) => [name, String(value)]));
}
