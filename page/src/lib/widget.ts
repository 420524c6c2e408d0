/** Answers from a notebook's kernel, over the messages of anywidget. */

import type { Address } from './router.svelte';
import { learn } from './translations';
import { Problem, headerNumber, type Bytes, type Transport } from './transport';

type Listener = (message: Answer, buffers: DataView[]) => void;

/** The part of anywidget's model that is used. */
export interface WidgetModel {
  send(content: object, callbacks?: object, buffers?: ArrayBuffer[]): void;
  on(event: string, listener: Listener): void;
  off(event: string, listener: Listener): void;
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
}

/** A request; an image is a buffer beside it, and `type` its kind. */
interface Question {
  path: string;
  method: 'GET' | 'POST';
  body?: object;
  type?: string;
}

/** A reply: JSON, or bytes in a buffer beside it. */
interface Answer {
  id: number;
  status: number;
  headers: Record<string, string>;
  json?: unknown;
}

interface Waiting {
  resolve(reply: { answer: Answer; buffer: ArrayBuffer }): void;
  reject(problem: Error): void;
}

const PATIENCE = 120_000; // a busy kernel answers when its cell is done
const SILENT = 'the kernel has not answered';
const SILENT_HINT = 'Is it busy, or has it been restarted?';
learn({ zh: { [SILENT]: '内核没有回答', [SILENT_HINT]: '它是否正忙，或已重新启动？' } });

export class WidgetTransport implements Transport {
  readonly kind = 'widget';
  #asked = 0;
  #waiting = new Map<number, Waiting>();

  constructor(readonly model: WidgetModel) {
    model.on('msg:custom', this.#hear);
  }

  /** The view as a trait: a notebook can set it and read it. */
  address(): Address {
    return {
      read: () => String(this.model.get('view') ?? ''),
      write: (hash) => {
        this.model.set('view', hash);
        this.model.save_changes();
      },
      listen: (changed) => {
        this.model.on('change:view', changed);
        return () => this.model.off('change:view', changed);
      },
    };
  }

  close(): void {
    this.model.off('msg:custom', this.#hear);
  }

  async json<Result>(path: string, signal?: AbortSignal): Promise<Result> {
    return learn((await this.#ask({ path, method: 'GET' }, [], signal)).answer.json as Result);
  }

  async bytes(path: string, signal?: AbortSignal): Promise<Bytes> {
    const { answer, buffer } = await this.#ask({ path, method: 'GET' }, [], signal);
    return { buffer, header: (name) => headerNumber(name, answer.headers[name]) };
  }

  async post<Result>(path: string, body: object | Blob): Promise<Result> {
    const blob = body instanceof Blob;
    const sent = blob ? { type: body.type } : { body };
    const buffers = blob ? [await body.arrayBuffer()] : [];
    return (await this.#ask({ path, method: 'POST', ...sent }, buffers)).answer.json as Result;
  }

  #ask(question: Question, buffers: ArrayBuffer[], signal?: AbortSignal) {
    const id = ++this.#asked;
    return new Promise<{ answer: Answer; buffer: ArrayBuffer }>((resolve, reject) => {
      const stop = () => {
        clearTimeout(timer);
        this.#waiting.delete(id);
      };
      const timer = setTimeout(() => {
        stop();
        reject(new Problem(SILENT, SILENT_HINT));
      }, PATIENCE);
      signal?.addEventListener('abort', () => {
        stop();
        reject(signal.reason);
      });
      this.#waiting.set(id, {
        resolve: (reply) => (stop(), resolve(reply)),
        reject: (problem) => (stop(), reject(problem)),
      });
      this.model.send({ id, ...question }, undefined, buffers);
    });
  }

  #hear = (answer: Answer, buffers: DataView[]): void => {
    const waiting = this.#waiting.get(answer.id);
    if (!waiting) return;
    if (answer.status >= 400) {
      waiting.reject(Problem.told(answer.json, '', answer.status));
      return;
    }
    const view = buffers[0];
    // A copy: the view may start anywhere in its buffer, and a Uint16Array may not.
    const buffer = view
      ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength)
      : new ArrayBuffer(0);
    waiting.resolve({ answer, buffer: buffer as ArrayBuffer });
  };
}
