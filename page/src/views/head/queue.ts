/** A queue of requests: few at once, the wanted ones first, cancelled if no longer wanted. */

export interface Request {
  readonly key: string;
  /** Runs until it is done or the signal aborts it. */
  readonly run: (signal: AbortSignal) => Promise<void>;
}

/** The most requests at once. */
const AT_ONCE = 6;

/** Multiples of `patience` after which a request is sent even while others come and go. */
const LONGEST = 3;

export class Queue {
  readonly #failed: (error: unknown, key: string) => void;
  readonly #running = new Map<string, AbortController>();
  #waiting: Request[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;
  #since = 0;

  constructor(failed: (error: unknown, key: string) => void) {
    this.#failed = failed;
  }

  get busy(): boolean {
    return this.#running.size > 0 || this.#waiting.length > 0;
  }

  /**
   * From now on these are wanted, most important first; whatever else was under way is cancelled.
   * A new wish must last for `patience` milliseconds before it is sent.
   */
  want(requests: readonly Request[], patience: number): void {
    const keys = new Set(requests.map((request) => request.key));
    for (const [key, controller] of this.#running) {
      if (!keys.has(key)) this.#stop(key, controller);
    }
    const known = new Set(this.#waiting.map((request) => request.key));
    this.#waiting = requests.filter((request) => !this.#running.has(request.key));
    const old = this.#waiting.filter((request) => known.has(request.key)).length;
    // Where nothing of the last wishes is left, as between two levels of a zoom, time starts anew:
    // what is only passed through is never asked for.
    if (old < this.#waiting.length) {
      this.#delay(patience, old === 0 && this.#running.size === 0);
    }
  }

  /** Cancel everything. */
  close(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#waiting = [];
    for (const [key, controller] of this.#running) this.#stop(key, controller);
  }

  #stop(key: string, controller: AbortController): void {
    this.#running.delete(key);
    controller.abort();
  }

  #delay(patience: number, anew: boolean): void {
    const now = performance.now();
    if (anew || this.#timer === undefined) this.#since = now;
    clearTimeout(this.#timer);
    const left = this.#since + LONGEST * patience - now;
    const pause = Math.max(0, Math.min(patience, left));
    this.#timer = setTimeout(() => {
      this.#timer = undefined;
      this.#fill();
    }, pause);
  }

  #fill(): void {
    if (this.#timer !== undefined) return;
    while (this.#running.size < AT_ONCE) {
      const request = this.#waiting.shift();
      if (request === undefined) return;
      void this.#run(request);
    }
  }

  async #run({ key, run }: Request): Promise<void> {
    const controller = new AbortController();
    this.#running.set(key, controller);
    try {
      await run(controller.signal);
    } catch (error) {
      if (!controller.signal.aborted) this.#failed(error, key);
    } finally {
      // A cancelled request may have been wanted again: only its own entry is its to remove.
      if (this.#running.get(key) === controller) this.#running.delete(key);
      this.#fill();
    }
  }
}
