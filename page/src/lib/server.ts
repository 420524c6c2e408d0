/** Answers from `headwise look`, over HTTP. */

import { learn } from './translations';
import { Problem, headerNumber, type Bytes, type Transport } from './transport';

export class ServerTransport implements Transport {
  readonly kind = 'server';

  async json<Answer>(path: string, signal?: AbortSignal): Promise<Answer> {
    return learn((await (await this.#fetch(path, { signal })).json()) as Answer);
  }

  async bytes(path: string, signal?: AbortSignal): Promise<Bytes> {
    const response = await this.#fetch(path, { signal });
    return {
      buffer: await response.arrayBuffer(),
      header: (name) => headerNumber(name, response.headers.get(name)),
    };
  }

  async post<Answer>(path: string, body: object | Blob): Promise<Answer> {
    const blob = body instanceof Blob;
    const response = await this.#fetch(path, {
      method: 'POST',
      body: blob ? body : JSON.stringify(body),
      headers: { 'Content-Type': blob ? body.type : 'application/json' },
    });
    return response.json() as Promise<Answer>;
  }

  async #fetch(path: string, options: RequestInit): Promise<Response> {
    const response = await fetch(path, options);
    if (response.ok) return response;
    const answer: unknown = await response.json().catch(() => ({}));
    throw Problem.told(answer, response.statusText, response.status);
  }
}
