/** Light, dark, or as the system wishes. */

import { recall, remember } from './language.svelte';
import type { Mode } from './colour';

export type Choice = 'system' | Mode;

const KEY = 'headwise.theme';
const ORDER: Choice[] = ['system', 'light', 'dark'];

class Theme {
  choice = $state<Choice>(ORDER.find((choice) => choice === recall(KEY)) ?? 'system');
  #systemDark = $state(false);

  constructor() {
    const query = matchMedia('(prefers-color-scheme: dark)');
    this.#systemDark = query.matches;
    query.addEventListener('change', () => (this.#systemDark = query.matches));
  }

  /** The theme shown: the choice, or the system's. */
  get mode(): Mode {
    if (this.choice !== 'system') return this.choice;
    return this.#systemDark ? 'dark' : 'light';
  }

  /** The next choice of system, light, dark. */
  next(): void {
    this.choice = ORDER[(ORDER.indexOf(this.choice) + 1) % ORDER.length]!;
    remember(KEY, this.choice);
  }
}

/** The theme of the page, everywhere. */
export const theme = new Theme();
