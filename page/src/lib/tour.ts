/** Remembers that the tour was seen or dismissed, so that it opens by itself once only. */

import { recall, remember } from './language.svelte';
import type { Look } from './look.svelte';

const KEY = 'headwise.tour';

/** True for a newcomer who sees all heads: not in a notebook, nor inside another site. */
export function isNew(look: Look): boolean {
  const framed = window.self !== window.top;
  return look.transport.kind !== 'widget' && !framed && recall(KEY) === null;
}

export function seen(): void {
  remember(KEY, 'seen');
}
