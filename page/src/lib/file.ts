/** Answers from the file itself: what `headwise look --out file.html` wrote into it. */

import { halfBits, weightOf } from './half';
import type { MapShape, TopKeys, Weight } from './types';
import { Problem, headerNumber, type Bytes, type Transport } from './transport';

/** The blob in the file: answers by the path that asks for them, their parameters in any order. */
export interface Recorded {
  format: 1;
  json: Record<string, unknown>;
  bytes: Record<string, { headers: Record<string, string | number>; base64: string }>;
}

/** The id of the script element of type application/json that holds the blob. */
export const RECORDED_ID = 'headwise-recorded';

/** The same question always as the same text: parameters in alphabetical order. */
export function canonical(path: string): string {
  const [place, query] = path.split('?', 2);
  if (!query) return place!;
  const parameters = new URLSearchParams(query);
  parameters.sort();
  return `${place}?${parameters}`;
}

export class FileTransport implements Transport {
  readonly kind = 'file';
  readonly #json: Map<string, unknown>;
  readonly #bytes: Map<string, Recorded['bytes'][string]>;

  constructor(recorded: Recorded) {
    this.#json = canonicalKeys(recorded.json);
    this.#bytes = canonicalKeys(recorded.bytes);
  }

  async json<Answer>(path: string): Promise<Answer> {
    const key = canonical(path);
    const answer = this.#json.has(key) ? this.#json.get(key) : await this.#derived(path);
    if (answer === undefined) throw missing(path);
    return answer as Answer;
  }

  async bytes(path: string): Promise<Bytes> {
    const found = this.#bytes.get(canonical(path));
    if (found) {
      return {
        buffer: decode(found.base64),
        header: (name) => headerNumber(name, found.headers[name]?.toString()),
      };
    }
    const [, map, line, index] = /^(.*)\/(row|column)\/(\d+)$/.exec(path) ?? [];
    const weights = map && (await this.#line(map, line as 'row' | 'column', Number(index)));
    if (!weights) throw missing(path);
    return { buffer: weights.buffer as ArrayBuffer, header: (name) => headerNumber(name, null) };
  }

  async post<Answer>(): Promise<Answer> {
    throw new Problem('this file shows what was recorded', 'headwise look reads new text');
  }

  /** What follows from the finest tiles in the file, to float16's three digits. */
  async #derived(path: string): Promise<unknown> {
    const weight = /^(.*)\/weight\/(\d+)\/(\d+)$/.exec(path);
    if (weight) {
      const row = await this.#line(weight[1]!, 'row', Number(weight[2]));
      const value = row?.[Number(weight[3])];
      return value === undefined
        ? undefined
        : ({ weight: value, logit: null, lse: null } satisfies Weight);
    }
    const top = /^(.*)\/top\?(.*)$/.exec(path);
    return top ? this.#top(top[1]!, new URLSearchParams(top[2])) : undefined;
  }

  async #top(map: string, parameters: URLSearchParams): Promise<TopKeys | undefined> {
    const rows: TopKeys['rows'] = [];
    const [start, stop, k] = ['row_start', 'row_stop', 'k'].map((n) => Number(parameters.get(n)));
    for (let index = start!; index < stop!; index++) {
      const row = await this.#line(map, 'row', index);
      if (!row) return undefined;
      const keys = Array.from(row, (weight, key): [number, number] => [key, weight]);
      keys.sort((one, other) => other[1] - one[1]);
      rows.push(keys.slice(0, k).filter(([, weight]) => weight > 0));
    }
    return { rows };
  }

  /** A row or a column of a map, pieced together from its tiles of single weights. */
  async #line(map: string, line: 'row' | 'column', index: number) {
    const shape = this.#json.get(map) as MapShape | undefined;
    if (!shape) return undefined;
    const along = line === 'row' ? shape.columns : shape.rows;
    const across = Math.floor(index / shape.tile);
    const weights = new Float32Array(along);
    for (let part = 0; part * shape.tile < along; part++) {
      const [x, y] = line === 'row' ? [part, across] : [across, part];
      if (shape.causal && x > y) continue; // never asked for: nothing is seen there
      const path = `${map}/tile/${shape.levels - 1}/${x}/${y}?how=mean&drop=0`;
      const tile = this.#bytes.get(canonical(path));
      if (!tile) return undefined;
      const bits = halfBits(decode(tile.base64));
      const columns = Number(tile.headers['X-Columns']);
      const inside = index % shape.tile;
      const count = Math.min(shape.tile, along - part * shape.tile);
      for (let cell = 0; cell < count; cell++) {
        const place = line === 'row' ? inside * columns + cell : cell * columns + inside;
        weights[part * shape.tile + cell] = weightOf(bits[place]!);
      }
    }
    return weights;
  }
}

function canonicalKeys<Value>(record: Record<string, Value>): Map<string, Value> {
  return new Map(Object.entries(record).map(([path, value]) => [canonical(path), value]));
}

function decode(base64: string): ArrayBuffer {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < bytes.length; index++) bytes[index] = text.charCodeAt(index);
  return bytes.buffer;
}

function missing(path: string): Problem {
  return new Problem(`not in this file: ${path}`, 'headwise look shows every head', 404);
}
