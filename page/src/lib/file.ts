/** Answers from the file itself, written by `headwise look --out file.html`. */

import { halfBits, weightOf } from './half';
import { learn } from './translations';
import { Problem, headerNumber, type Bytes, type Transport } from './transport';
import type { MapShape, TopKeys, Weight } from './types';

/** An answer: JSON as it is, or bytes compressed and in base64. */
type Kept = { json: unknown } | { gzip: string; headers: Record<string, string> };

/** The content of the file: answers by their path. */
export interface Recorded {
  version: string;
  answers: Record<string, Kept>;
}

/** The id of the script element of type application/json that holds what was recorded. */
export const RECORDED_ID = 'headwise-data';

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
  readonly #answers: Map<string, Kept>;

  constructor({ answers }: Recorded) {
    const entries = Object.entries(answers);
    this.#answers = new Map(entries.map(([path, kept]) => [canonical(path), kept]));
  }

  async json<Answer>(path: string): Promise<Answer> {
    const kept = this.#answers.get(canonical(path));
    const answer = kept && 'json' in kept ? kept.json : await this.#derived(path);
    if (answer === undefined) throw missing();
    return learn(answer as Answer);
  }

  async bytes(path: string): Promise<Bytes> {
    const kept = this.#answers.get(canonical(path)) ?? this.#thumbnails(path);
    if (kept && 'gzip' in kept) {
      return {
        buffer: await decode(kept.gzip),
        header: (name) => headerNumber(name, kept.headers[name]),
      };
    }
    const [, map, line, of] = /^(.*)\/(row|column)\/([\d.-]+)$/.exec(path) ?? [];
    const weights = map && (await this.#lines(map, line as 'row' | 'column', numbersIn(of!)));
    if (!weights) throw missing();
    return { buffer: weights.buffer as ArrayBuffer, header: (name) => headerNumber(name, null) };
  }

  /** Small maps in the largest size that the file has, whichever was asked for. */
  #thumbnails(path: string): Kept | undefined {
    if (!path.includes('/thumbnails?')) return undefined;
    const anySize = (key: string) => key.replace(/size=\d+/, '');
    const size = (key: string) => Number(/size=(\d+)/.exec(key)?.[1]);
    const wanted = anySize(canonical(path));
    const found = [...this.#answers.keys()].filter((key) => anySize(key) === wanted);
    found.sort((one, other) => size(other) - size(one));
    return this.#answers.get(found[0] ?? '');
  }

  async post<Answer>(): Promise<Answer> {
    throw missing();
  }

  /** An answer derived from the finest tiles in the file, to float16's three digits. */
  async #derived(path: string): Promise<unknown> {
    const weight = /^(.*)\/weight\/(\d+)\/(\d+)$/.exec(path);
    if (weight) {
      const row = await this.#line(weight[1]!, 'row', Number(weight[2]));
      const value = row?.[Number(weight[3])];
      if (value === undefined) return undefined;
      return { weight: value, logit: null, lse: null } satisfies Weight;
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

  /** The mean of some rows or columns of a map. */
  async #lines(map: string, line: 'row' | 'column', of: readonly number[]) {
    let mean: Float32Array | undefined;
    for (const index of of) {
      const weights = await this.#line(map, line, index);
      if (!weights) return undefined;
      mean ??= new Float32Array(weights.length);
      for (let at = 0; at < weights.length; at++) mean[at]! += weights[at]! / of.length;
    }
    return mean;
  }

  /** A row or a column of a map, pieced together from its tiles of single weights. */
  async #line(map: string, line: 'row' | 'column', index: number) {
    const kept = this.#answers.get(map);
    if (!kept || !('json' in kept)) return undefined;
    const shape = kept.json as MapShape;
    const along = line === 'row' ? shape.columns : shape.rows;
    const across = Math.floor(index / shape.tile);
    const inside = index % shape.tile;
    const weights = new Float32Array(along);
    for (let part = 0; part * shape.tile < along; part++) {
      const [x, y] = line === 'row' ? [part, across] : [across, part];
      if (shape.causal && x > y) continue; // above the diagonal everything is hidden
      const tile = await this.#leaf(map, shape.levels - 1, x, y);
      if (!tile) return undefined;
      const count = Math.min(shape.tile, along - part * shape.tile);
      for (let cell = 0; cell < count; cell++) {
        const place = line === 'row' ? inside * tile.columns + cell : cell * tile.columns + inside;
        weights[part * shape.tile + cell] = weightOf(tile.bits[place]!);
      }
    }
    return weights;
  }

  readonly #leaves = new Map<string, { bits: Uint16Array; columns: number }>();

  async #leaf(map: string, level: number, x: number, y: number) {
    const path = canonical(`${map}/tile/${level}/${x}/${y}?how=mean&drop=0`);
    const known = this.#leaves.get(path);
    if (known) return known;
    const kept = this.#answers.get(path);
    if (!kept || !('gzip' in kept)) return undefined;
    const leaf = {
      bits: halfBits(await decode(kept.gzip)),
      columns: Number(kept.headers['X-Columns']),
    };
    if (this.#leaves.size >= 64) this.#leaves.delete(this.#leaves.keys().next().value!);
    this.#leaves.set(path, leaf);
    return leaf;
  }
}

async function decode(base64: string): Promise<ArrayBuffer> {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).arrayBuffer();
}

/** 3, 4, 5 and 9 of 3-5.9. */
function numbersIn(text: string): number[] {
  return text.split('.').flatMap((stretch) => {
    const [first, last] = stretch.split('-').map(Number) as [number, number?];
    return Array.from({ length: (last ?? first) - first + 1 }, (_, step) => first + step);
  });
}

const MISSING = 'This is not in the file';
const MISSING_HINT = 'run headwise look to see every head and to read new text';
learn({
  zh: {
    [MISSING]: '文件里没有这一项',
    [MISSING_HINT]: '运行 headwise look 可以看到每个头，也能读新文本',
  },
});

function missing(): Problem {
  return new Problem(MISSING, MISSING_HINT, 404);
}
