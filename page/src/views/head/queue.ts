/** What is asked of the source: few things at once, the wanted ones first, the unwanted never. */

export interface Request {
  readonly key: string;
  /** Runs until it is done or the signal says that nobody waits for it any more. */
  readonly run: (signal: AbortSignal) => Promise<void>;
}

export interface Limits {
  /** How many requests may be under way. */
  readonly atOnce: number;
  /** Milliseconds a new wish must last before it is sent. */
  readonly patience: number;
  /** Milliseconds after which it is sent even while the wishes keep changing. */
  readonly longest: number;
}

const LIMITS: Limits = { atOnce: 6, patience: 40, longest: 160 };

export class Queue {
  readonly #limits: Limits;
  readonly #failed: (error: unknown, key: string) => void;
  readonly #running = new Map<string, AbortController>();
  #waiting: Request[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;
  #since = 0;

  constructor(failed: (error: unknown, key: string) => void, limits: Limits = LIMITS) {
    this.#failed = failed;
    this.#limits = limits;
  }

  get busy(): boolean {
    return this.#running.size > 0 || this.#waiting.length > 0;
  }

  /** From now on these are wanted, most important first; whatever else was under way is cancelled. */
  want(requests: readonly Request[]): void {
    const keys = new Set(requests.map((request) => request.key));
    for (const [key, controller] of this.#running) {
      if (!keys.has(key)) this.#stop(key, controller);
    }
    const known = new Set(this.#waiting.map((request) => request.key));
    this.#waiting = requests.filter((request) => !this.#running.has(request.key));
    if (this.#waiting.some((request) => !known.has(request.key))) this.#delay(known.size === 0);
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

  #delay(first: boolean): void {
    const now = performance.now();
    if (first || this.#timer === undefined) this.#since = now;
    clearTimeout(this.#timer);
    const left = this.#since + this.#limits.longest - now;
    const pause = Math.max(0, Math.min(this.#limits.patience, left));
    this.#timer = setTimeout(() => {
      this.#timer = undefined;
      this.#fill();
    }, pause);
  }

  #fill(): void {
    if (this.#timer !== undefined) return;
    while (this.#running.size < this.#limits.atOnce) {
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
