/** A way to reach the API: a server, a file or a notebook's kernel, all with the same answers. */

import { speech } from './language.svelte';
import { learn, said } from './translations';

/** A problem and its remedy, in English and in the language of the page. */
export class Problem extends Error {
  constructor(
    message: string,
    readonly hint: string = '',
    readonly status: number = 0,
  ) {
    super(message);
  }

  /** The problem that a refusal tells of. */
  static told(answer: unknown, otherwise: string, status: number): Problem {
    const { error, hint } = (learn(answer) ?? {}) as { error?: string; hint?: string };
    return new Problem(error ?? otherwise, hint, status);
  }

  get text(): string {
    return said(this.message);
  }

  get advice(): string {
    return said(this.hint);
  }

  /** The problem and its remedy in one line. */
  get line(): string {
    return [this.text, this.advice].filter(Boolean).join(speech.current === 'zh' ? '；' : '; ');
  }
}

/** An answer of bytes, with the headers that say their shape. */
export interface Bytes {
  buffer: ArrayBuffer;
  header(name: string): number;
}

export interface Transport {
  readonly kind: 'server' | 'file' | 'widget';
  json<Answer>(path: string, signal?: AbortSignal): Promise<Answer>;
  bytes(path: string, signal?: AbortSignal): Promise<Bytes>;
  /** Ask for something to be done: JSON, or an image as it is. */
  post<Answer>(path: string, body: object | Blob): Promise<Answer>;
}

/** The number in a header; a missing one is the server's mistake. */
export function headerNumber(name: string, text: string | null | undefined): number {
  const value = Number(text ?? NaN);
  if (Number.isNaN(value)) throw new Problem(`the answer has no header ${name}`);
  return value;
}
