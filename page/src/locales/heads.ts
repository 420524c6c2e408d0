import { dictionary } from '../lib/language.svelte';

const en = {
  keys: [] as [string, string][],
};

const zh: typeof en = {
  keys: [],
};

export const words = dictionary(en, zh);
