/** The experiment that the server runs for the page: followed while it goes on. */

import type { Source } from '../../lib/source';
import { Problem } from '../../lib/transport';
import type { JobProgress } from './answers';

const WHILE_GOING = 500;
const AFTER_A_PROBLEM = 3_000;

export class LabJob {
  /** The last experiment; null before the first. */
  progress = $state.raw<JobProgress | null>(null);
  problem = $state.raw<Problem | null>(null);
  /** The number of experiments that have ended: results are asked for again when it changes. */
  ended = $state(0);
  #timer: ReturnType<typeof setTimeout> | undefined;
  #closed = false;

  constructor(readonly source: Source) {
    void this.#follow(() => source.labJob());
  }

  get going(): boolean {
    return this.progress?.state === 'running' || this.progress?.state === 'stopping';
  }

  start(id: string): Promise<void> {
    return this.#follow(() => this.source.runLab(id));
  }

  stop(): Promise<void> {
    return this.#follow(() => this.source.runLab());
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
  }

  async #follow(ask: () => Promise<JobProgress>): Promise<void> {
    clearTimeout(this.#timer);
    const before = this.going;
    try {
      const answer = await ask();
      this.progress = answer.id === null ? null : answer;
      this.problem = null;
      if (before && !this.going) this.ended++;
    } catch (error) {
      this.problem = error instanceof Problem ? error : new Problem(String(error));
    }
    if (this.#closed || !this.going) return;
    const later = this.problem ? AFTER_A_PROBLEM : WHILE_GOING;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#follow(() => this.source.labJob()), later);
  }
}
