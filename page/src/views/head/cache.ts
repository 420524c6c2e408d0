/** Things kept while they are used: the least recently used go when their bytes grow too many. */

export class Cache<Kept> {
  readonly #limit: number;
  readonly #kept = new Map<string, { readonly value: Kept; readonly bytes: number }>();
  #bytes = 0;

  constructor(limit: number) {
    this.#limit = limit;
  }

  get bytes(): number {
    return this.#bytes;
  }

  /** The value of a key; asking counts as use. */
  get(key: string): Kept | undefined {
    const found = this.#kept.get(key);
    if (found === undefined) return undefined;
    this.#kept.delete(key); // a Map remembers the order of insertion: the first is the oldest
    this.#kept.set(key, found);
    return found.value;
  }

  has(key: string): boolean {
    return this.#kept.has(key);
  }

  set(key: string, value: Kept, bytes: number): void {
    this.#remove(key);
    this.#kept.set(key, { value, bytes });
    this.#bytes += bytes;
    for (const oldest of this.#kept.keys()) {
      if (this.#bytes <= this.#limit || oldest === key) break;
      this.#remove(oldest);
    }
  }

  #remove(key: string): void {
    const found = this.#kept.get(key);
    if (found === undefined) return;
    this.#bytes -= found.bytes;
    this.#kept.delete(key);
  }
}
