/** The pages of the page; the first that is offered opens. */

import type { Component } from 'svelte';
import type { State } from '../lib/types';
import { words as compare } from '../locales/compare';
import { words as cost } from '../locales/cost';
import { words as head } from '../locales/head';
import { words as heads } from '../locales/heads';
import { words as lab } from '../locales/lab';
import { words as reasons } from '../locales/reasons';
import { words as sparse } from '../locales/sparse';
import { words as watch } from '../locales/watch';
import { words as why } from '../locales/why';
import Compare from '../views/Compare.svelte';
import Cost from '../views/Cost.svelte';
import Head from '../views/Head.svelte';
import Heads from '../views/Heads.svelte';
import Lab from '../views/Lab.svelte';
import Reasons from '../views/Reasons.svelte';
import Sparse from '../views/Sparse.svelte';
import Watch from '../views/Watch.svelte';
import Why from '../views/Why.svelte';

export interface Page {
  id: string;
  view: Component;
  /** Its view's words: its name and the keys it listens to are among them. */
  words: () => { page: string; keys: [string, string][] };
  /** It shows what the model did with an input, so it needs one. */
  ofInput: boolean;
  /** By default, where something answers at /api/ID. */
  offered?(state: State): boolean;
}

/** A model that is loading or broken has its page too; a run, a report and a file without a model have none. */
const ofHeads = (state: State) =>
  state.pages.heads ||
  !(state.pages.watch || state.pages.sparse || (state.static && state.pages.lab));

const PAGES: readonly Page[] = [
  { id: 'heads', view: Heads, words: heads, ofInput: true, offered: ofHeads },
  { id: 'head', view: Head, words: head, ofInput: true, offered: ofHeads },
  {
    id: 'reasons',
    view: Reasons,
    words: reasons,
    ofInput: true,
    offered: (state) =>
      ofHeads(state) &&
      (state.inputs ?? []).some((input) => input.groups.some((group) => group.predicts)),
  },
  { id: 'compare', view: Compare, words: compare, ofInput: true, offered: ofHeads },
  { id: 'watch', view: Watch, words: watch, ofInput: false },
  { id: 'sparse', view: Sparse, words: sparse, ofInput: false },
  { id: 'cost', view: Cost, words: cost, ofInput: false },
  { id: 'lab', view: Lab, words: lab, ofInput: false },
  { id: 'why', view: Why, words: why, ofInput: false },
];

/** The pages that the server, or the file, offers; none before its state is known. */
export const offeredPages = (state: State | null | undefined): Page[] =>
  PAGES.filter((each) => state && (each.offered?.(state) ?? state.pages[each.id]));
