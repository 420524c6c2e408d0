/** A run as far as it has come: asked for again and again, and each time only what is new. */

import type { Source } from '../../lib/source';
import { Problem } from '../../lib/transport';
import type { Series, Story, WatchState } from '../../lib/types';

/** The default view. */
const USUAL = 'entropy_mean';

const WHILE_GOING = 1_000;
const AFTERWARDS = 5_000;

/** A run writes at least every ten seconds while it goes on, unless its steps take longer. */
const GOING = 60;

export class Run {
  state = $state.raw<WatchState | null>(null);
  series = $state.raw<Series | null>(null);
  story = $state.raw<Story | null>(null);
  /** The statistic of the series. */
  statistic = $state.raw<string | null>(null);
  problem = $state.raw<Problem | null>(null);
  #wanted: string | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #busy = false;
  #again = false;
  #closed = false;

  /** `which`: the run that another one is compared with is 1. */
  constructor(
    readonly source: Source,
    readonly which?: 1,
  ) {}

  /** Something was written a short while ago. */
  get going(): boolean {
    return this.state !== null && this.state.age < GOING;
  }

  /** Follow a statistic: from now on `series` is of it. */
  async follow(statistic: string | null): Promise<void> {
    this.#wanted = statistic;
    await this.#refresh();
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
  }

  /** One reading at a time, or two would add the same steps. */
  async #refresh(): Promise<void> {
    this.#again = true;
    if (this.#busy) return;
    this.#busy = true;
    clearTimeout(this.#timer);
    while (this.#again && !this.#closed) {
      this.#again = false;
      await this.#read();
    }
    this.#busy = false;
    if (this.#closed || this.source.transport.kind === 'file') return;
    this.#timer = setTimeout(() => void this.#refresh(), this.going ? WHILE_GOING : AFTERWARDS);
  }

  async #read(): Promise<void> {
    try {
      const state = await this.source.watch(this.which);
      const named = [this.#wanted, USUAL].find((name) => name && state.statistics.includes(name));
      const statistic = named ?? state.statistics[0];
      if (statistic) await this.#grow(statistic, state.step);
      if (
        !this.story ||
        state.step !== this.state?.step ||
        state.alarms.length !== this.state.alarms.length
      )
        this.story = await this.source.story(this.which);
      this.state = state;
      this.problem = null;
    } catch (error) {
      this.problem = error instanceof Problem ? error : new Problem(String(error));
    }
  }

  async #grow(statistic: string, last: number | null): Promise<void> {
    let known = this.statistic === statistic ? this.series : null;
    const from = known?.steps.at(-1);
    if (known && from === last) return;
    if (from !== undefined && (last === null || last < from)) known = null; // it was resumed earlier
    const news = await this.source.series(statistic, known ? from : undefined, this.which);
    if (known && news.every === known.every) {
      if (!news.steps.length) return;
      this.series = {
        every: news.every,
        steps: [...known.steps, ...news.steps],
        values: [...known.values, ...news.values],
      };
    } else {
      // A longer run gives fewer of its steps: those we have are no longer the ones it gives.
      this.series = known ? await this.source.series(statistic, undefined, this.which) : news;
      this.statistic = statistic;
    }
  }
}
