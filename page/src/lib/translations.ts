/** The server's sentences in English, and in 中文 under `zh` of the same answer. */

import { speech } from './language.svelte';
import type { Group } from './types';

const chinese = new Map<string, string>();

/** Remember an answer's 中文; gives the answer back. */
export function learn<Answer>(answer: Answer): Answer {
  const { zh } = (answer ?? {}) as { zh?: Record<string, string> };
  for (const [english, text] of Object.entries(zh ?? {})) chinese.set(english, text);
  return answer;
}

/** A sentence of an answer in the language of the page; in English if it has no translation. */
export function said(english: string): string {
  return speech.current === 'zh' ? (chinese.get(english) ?? english) : english;
}

/** The name of a group: a known kind of attention in the words of the page, else as it is told. */
export function groupName(names: Readonly<Record<string, string>>, { id, name }: Group): string {
  return names[id] ?? said(name);
}
