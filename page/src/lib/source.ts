/** The API as typed requests over any transport. */

import { halfBits } from './half';
import type { Transport } from './transport';
import type {
  Axis,
  Cells,
  GroupId,
  HeadAddress,
  Heads,
  KeySpan,
  MapShape,
  Over,
  Pooling,
  Prediction,
  Reason,
  ReasonEdge,
  Reasons,
  Series,
  Shares,
  State,
  Story,
  StripRange,
  Strips,
  Support,
  Thumbnails,
  Tokens,
  TopKeys,
  WatchState,
  Weight,
} from './types';

type Parameters = Record<string, string | number | undefined>;

/** The most answers to keep, of those that can't change. */
const KEPT = 200;

export class Source {
  readonly #kept = new Map<string, Promise<unknown>>();

  constructor(readonly transport: Transport) {}

  state(): Promise<State> {
    return this.transport.json('/api/state');
  }

  tokens(input: string, group: GroupId, axis: Axis, start: number, stop: number): Promise<Tokens> {
    const path = `${inputPath(input)}/tokens`;
    return this.#keep(query(path, { group, axis, start, stop }));
  }

  heads(input: string): Promise<Heads> {
    return this.#keep(`${inputPath(input)}/heads`);
  }

  /** The pooled maps of a group's heads, in the order of `heads`. */
  async thumbnails(input: string, group: GroupId, size: number, pooling: Pooling) {
    const path = query(`${inputPath(input)}/thumbnails`, { group, size, ...pooling });
    const answer = await this.transport.bytes(path);
    const bits = halfBits(answer.buffer);
    const [rows, columns] = [answer.header('X-Rows'), answer.header('X-Columns')];
    return { bits, rows, columns, heads: bits.length / (rows * columns) } satisfies Thumbnails;
  }

  map(head: HeadAddress): Promise<MapShape> {
    return this.#keep(headPath(head));
  }

  async tile(
    head: HeadAddress,
    level: number,
    x: number,
    y: number,
    pooling: Pooling,
    signal?: AbortSignal,
  ): Promise<Cells> {
    const { of, ...how } = pooling;
    const { input, group, layer, head: number } = head;
    const map =
      of === undefined
        ? headPath(head)
        : `${inputPath(input)}/reasons/${of}/${group}/${layer}/${number}`;
    const path = query(`${map}/tile/${level}/${x}/${y}`, of === undefined ? how : {});
    const answer = await this.transport.bytes(path, signal);
    return {
      bits: halfBits(answer.buffer),
      rows: answer.header('X-Rows'),
      columns: answer.header('X-Columns'),
      ...(of === undefined ? {} : { largest: answer.header('X-Largest') }),
    };
  }

  strips(
    head: HeadAddress,
    size: number,
    range: StripRange = {},
    signal?: AbortSignal,
  ): Promise<Strips> {
    return this.transport.json(query(`${headPath(head)}/strips`, { size, ...range }), signal);
  }

  /** The exact weights of rows, or those on columns: the mean of several, of one or many heads. */
  async line(
    { input, group, layer, head }: HeadAddress,
    axis: 'row' | 'column',
    tokens: readonly number[],
    over: Over = 'head',
    signal?: AbortSignal,
  ): Promise<Float32Array> {
    const heads = { head: `${layer}/${head}`, layer: `${layer}/all`, all: 'all/all' }[over];
    const of = `${inputPath(input)}/map/${group}/${heads}`;
    const answer = await this.transport.bytes(`${of}/${axis}/${stretches(tokens)}`, signal);
    return new Float32Array(answer.buffer);
  }

  weight(head: HeadAddress, row: number, column: number, signal?: AbortSignal): Promise<Weight> {
    return this.transport.json(`${headPath(head)}/weight/${row}/${column}`, signal);
  }

  /** The k largest weights of some rows, at most 512 of them. */
  top(
    head: HeadAddress,
    row_start: number,
    row_stop: number,
    k: number,
    signal?: AbortSignal,
  ): Promise<TopKeys> {
    return this.transport.json(query(`${headPath(head)}/top`, { row_start, row_stop, k }), signal);
  }

  /** The weight of a group's heads on a span of keys. */
  span(input: string, group: GroupId, span: KeySpan): Promise<Shares> {
    return this.#keep(query(`${inputPath(input)}/span`, { group, ...span }));
  }

  /** The predictions of a row with a span of keys hidden from a head, and without. */
  without(head: HeadAddress, span: KeySpan): Promise<Prediction> {
    return this.transport.json(query(`${headPath(head)}/without`, { ...span }));
  }

  /** The edges that matter most for the prediction of a row. */
  reasons(input: string, row: number): Promise<Reasons> {
    return this.#keep(`${inputPath(input)}/reasons/${row}`);
  }

  /** A head's map by what each edge gave to the prediction of a row. */
  support(input: string, row: number, { group, layer, head }: ReasonEdge): Promise<Support> {
    return this.#keep(`${inputPath(input)}/reasons/${row}/${group}/${layer}/${head}`);
  }

  /** The predictions of a row without some edges, and without some heads. */
  unseen(input: string, row: number, left: readonly Reason[]): Promise<Prediction> {
    const names = left.map((each) => {
      const head = `${each.group}:${each.layer}.${each.head}`;
      return 'key' in each ? `${head}:${each.query}:${each.key}` : head;
    });
    const path = `${inputPath(input)}/reasons/${row}/without`;
    return this.transport.json(query(path, { edges: names.join(',') }));
  }

  /** An image of an input, as PNG. */
  async image(input: string, number: number): Promise<Blob> {
    const answer = await this.transport.bytes(`${inputPath(input)}/image/${number}`);
    return new Blob([answer.buffer], { type: 'image/png' });
  }

  /** The number of tokens of a text, and the most that can be read; null while the model reads. */
  count(text: string): Promise<{ tokens: number | null; most: number | null }> {
    return this.transport.post('/api/tokens', { text });
  }

  /** Let the model read another text or image; `state` shows how far it is. */
  add(what: string | Blob): Promise<{ id: string }> {
    return this.transport.post('/api/inputs', typeof what === 'string' ? { text: what } : what);
  }

  why<Answer>(experiment: string, options: Parameters, signal?: AbortSignal): Promise<Answer> {
    return this.transport.json(query(`/api/why/${experiment}`, options), signal);
  }

  cost<Answer>(settings: Parameters, signal?: AbortSignal): Promise<Answer> {
    return this.transport.json(query('/api/cost', settings), signal);
  }

  /** The report of headwise sparse. */
  sparse<Answer>(): Promise<Answer> {
    return this.transport.json('/api/sparse');
  }

  /** The claims of the lab with their verdicts. */
  lab<Answer>(): Promise<Answer> {
    return this.transport.json('/api/lab');
  }

  /** One claim: its results, its derivation, its code. */
  claim<Answer>(id: string, signal?: AbortSignal): Promise<Answer> {
    return this.transport.json(`/api/lab/claims/${encodeURIComponent(id)}`, signal);
  }

  /** The verdict at every position to which a reader may move a result. */
  moved<Answer>(id: string, result: string, signal?: AbortSignal): Promise<Answer> {
    return this.transport.json(
      query(`/api/lab/claims/${encodeURIComponent(id)}/moved`, { result }),
      signal,
    );
  }

  /** The experiment that is running, or the last one. */
  labJob<Answer>(): Promise<Answer> {
    return this.transport.json('/api/lab/job');
  }

  /** Begin the experiment of a claim; without an id, end the one that is running. */
  runLab<Answer>(id?: string): Promise<Answer> {
    const path = id ? `claims/${encodeURIComponent(id)}/run` : 'stop';
    return this.transport.post(`/api/lab/${path}`, {});
  }

  /** The watched run, or, as 1, the one that it is compared with. */
  watch(run?: 1): Promise<WatchState> {
    return this.transport.json(query('/api/watch', { run }));
  }

  /** The run as a story: its loss, and its alarms from the first on. */
  story(run?: 1): Promise<Story> {
    return this.transport.json(query('/api/watch/story', { run }));
  }

  /** A figure of every head at the steps after `from`; without it at all of them. */
  series(statistic: string, from?: number, run?: 1): Promise<Series> {
    return this.transport.json(query('/api/watch/series', { statistic, from, run }));
  }

  /** Ask for everything again: another server may be answering now. */
  forget(): void {
    this.#kept.clear();
  }

  /** Ask once; an answer that failed is asked for again. */
  #keep<Answer>(path: string): Promise<Answer> {
    const known = this.#kept.get(path);
    if (known) return known as Promise<Answer>;
    const answer = this.transport.json<Answer>(path);
    this.#kept.set(path, answer);
    answer.catch(() => this.#kept.delete(path));
    if (this.#kept.size > KEPT) this.#kept.delete(this.#kept.keys().next().value!);
    return answer;
  }
}

function inputPath(input: string): string {
  return `/api/inputs/${encodeURIComponent(input)}`;
}

function headPath({ input, group, layer, head }: HeadAddress): string {
  return `${inputPath(input)}/map/${group}/${layer}/${head}`;
}

/** Numbers as one word: 3-5.9 is 3, 4, 5 and 9. */
export function stretches(numbers: readonly number[]): string {
  const found: [number, number][] = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first}-${last}`)).join('.');
}

function query(path: string, parameters: Parameters): string {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}
