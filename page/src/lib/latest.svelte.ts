/** Questions that follow a slider: one at a time is asked, and of those that wait only the last. */

import { untrack } from 'svelte';
import { Problem } from './transport';

export class Latest<Answer> {
  answer = $state.raw<Answer | null>(null);
  problem = $state.raw<Problem | null>(null);
  busy = $state(false);
  #next: (() => Promise<Answer>) | null = null;

  async ask(question: () => Promise<Answer>): Promise<void> {
    this.#next = question;
    if (untrack(() => this.busy)) return; // or an effect that asks would ask again when it is done
    this.busy = true;
    while (this.#next) {
      const asked: () => Promise<Answer> = this.#next;
      this.#next = null;
      try {
        this.answer = await asked();
        this.problem = null;
      } catch (error) {
        this.problem = error instanceof Problem ? error : new Problem(String(error));
      }
    }
    this.busy = false;
  }
}
