/** Answers from a notebook's kernel, over the messages of anywidget. */

import { Problem, headerNumber, type Bytes, type Transport } from './transport';

/** What is used of anywidget's model. */
export interface WidgetModel {
  send(content: object, callbacks?: object, buffers?: ArrayBuffer[]): void;
  on(event: 'msg:custom', listener: (message: Answer, buffers: DataView[]) => void): void;
  off(event: 'msg:custom', listener: (message: Answer, buffers: DataView[]) => void): void;
}

/** To the kernel: {ask: number, path, body?, type?}; from it: */
interface Answer {
  answer: number;
  status: number;
  headers: Record<string, string>;
  json?: unknown;
}

interface Waiting {
  resolve(reply: { answer: Answer; buffer: ArrayBuffer }): void;
  reject(problem: Error): void;
}

const PATIENCE = 120_000; // a busy kernel answers when its cell is done

export class WidgetTransport implements Transport {
  readonly kind = 'widget';
  #asked = 0;
  #waiting = new Map<number, Waiting>();

  constructor(readonly model: WidgetModel) {
    model.on('msg:custom', this.#hear);
  }

  close(): void {
    this.model.off('msg:custom', this.#hear);
  }

  async json<Result>(path: string, signal?: AbortSignal): Promise<Result> {
    return (await this.#ask({ path }, [], signal)).answer.json as Result;
  }

  async bytes(path: string, signal?: AbortSignal): Promise<Bytes> {
    const { answer, buffer } = await this.#ask({ path }, [], signal);
    return { buffer, header: (name) => headerNumber(name, answer.headers[name]) };
  }

  async post<Result>(path: string, body: object | Blob): Promise<Result> {
    const blob = body instanceof Blob;
    const question = blob ? { path, type: body.type } : { path, body };
    const buffers = blob ? [await body.arrayBuffer()] : [];
    return (await this.#ask(question, buffers)).answer.json as Result;
  }

  #ask(question: object, buffers: ArrayBuffer[], signal?: AbortSignal) {
    const ask = ++this.#asked;
    return new Promise<{ answer: Answer; buffer: ArrayBuffer }>((resolve, reject) => {
      const stop = () => {
        clearTimeout(timer);
        this.#waiting.delete(ask);
      };
      const timer = setTimeout(() => {
        stop();
        reject(new Problem('the kernel has not answered', 'Is it busy, or has it been restarted?'));
      }, PATIENCE);
      signal?.addEventListener('abort', () => {
        stop();
        this.model.send({ forget: ask });
        reject(signal.reason);
      });
      this.#waiting.set(ask, {
        resolve: (reply) => (stop(), resolve(reply)),
        reject: (problem) => (stop(), reject(problem)),
      });
      this.model.send({ ask, ...question }, undefined, buffers);
    });
  }

  #hear = (answer: Answer, buffers: DataView[]): void => {
    const waiting = this.#waiting.get(answer.answer);
    if (!waiting) return;
    if (answer.status >= 400) {
      const said = (answer.json ?? {}) as { error?: string; hint?: string };
      waiting.reject(new Problem(said.error ?? '', said.hint ?? '', answer.status));
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
