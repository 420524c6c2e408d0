/** Where we are: `#/head?input=0&layer=3` in the address, so that a link leads back to the view. */

export interface Route {
  /** heads, head, compare, why/scale, watch … */
  path: string;
  parameters: Readonly<Record<string, string>>;
}

/** Where the route is written: the browser's address, or a trait of a notebook's widget. */
export interface Address {
  read(): string;
  /** A step is something the back button leads back from. */
  write(hash: string, step: boolean): void;
  listen(changed: () => void): () => void;
}

/** The hash of the page's address. */
export const browserAddress: Address = {
  read: () => location.hash,
  write: (hash, step) => history[step ? 'pushState' : 'replaceState'](null, '', hash),
  listen: (changed) => {
    addEventListener('hashchange', changed);
    return () => removeEventListener('hashchange', changed);
  },
};

export type Changes = Record<string, string | number | boolean | null | undefined>;

/** The first page there is. */
const START: Route = { path: '', parameters: {} };

export class Router {
  route = $state.raw<Route>(START);

  readonly close: () => void;

  constructor(readonly address: Address) {
    const read = () => (this.route = parse(address.read()));
    read();
    this.close = address.listen(read);
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
    this.#show({ path, parameters: cleaned(parameters) }, true);
  }

  /** Change parameters in place: null removes one. The back button leads past such changes. */
  set(changes: Changes): void {
    const parameters = cleaned({ ...this.route.parameters, ...changes });
    this.#show({ path: this.route.path, parameters }, false);
  }

  /** The address of a view, for links that open in a new tab too. */
  link(path: string, parameters: Changes = {}): string {
    return addressOf({ path, parameters: cleaned(parameters) });
  }

  #show(route: Route, step: boolean): void {
    this.address.write(addressOf(route), step);
    this.route = route;
  }
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
