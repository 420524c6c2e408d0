/** The tiles of one head: asked for as they come into sight, kept while there is room. */

import { paint } from '../../lib/colour';
import { HALVES } from '../../lib/half';
import type { Source } from '../../lib/source';
import { Problem } from '../../lib/transport';
import type { Cells, HeadAddress, Pooling } from '../../lib/types';
import type { Cache } from './cache';
import type { Address } from './pyramid';
import { Queue } from './queue';

/** Cells, and the picture of them in the colours they were last drawn in. */
export interface Tile {
  readonly cells: Cells;
  /** The largest weight among them. */
  readonly most: number;
  picture: { readonly canvas: OffscreenCanvas; readonly table: Uint32Array } | null;
}

/** Bytes for decoded tiles: about 170 of the largest, a fifth of the page's memory. */
export const TILE_BYTES = 64 * 2 ** 20;

const BYTES_A_CELL = 2 + 4; // its float16 and its pixel

export class Tiles {
  readonly #source: Source;
  readonly #head: HeadAddress;
  readonly #pooling: Pooling;
  readonly #cache: Cache<Tile>;
  readonly #changed: () => void;
  readonly #queue: Queue;
  readonly #failed = new Map<string, Problem>();
  /** Nothing has come yet: then nothing is worth waiting for. */
  #empty = true;

  /** `changed` is called whenever a tile has arrived or could not be had. */
  constructor(
    source: Source,
    head: HeadAddress,
    pooling: Pooling,
    cache: Cache<Tile>,
    changed: () => void,
  ) {
    this.#source = source;
    this.#head = head;
    this.#pooling = pooling;
    this.#cache = cache;
    this.#changed = changed;
    this.#queue = new Queue((error, key) => {
      this.#failed.set(key, error instanceof Problem ? error : new Problem(String(error)));
      changed();
    });
  }

  /** A tile, if it is here. */
  at(address: Address): Tile | undefined {
    return this.#cache.get(this.#key(address));
  }

  /** True while tiles are loading. */
  get busy(): boolean {
    return this.#queue.busy;
  }

  /** Why tiles that are wanted now are not coming. */
  problem(addresses: readonly Address[]): Problem | null {
    for (const address of addresses) {
      const problem = this.#failed.get(this.#key(address));
      if (problem) return problem;
    }
    return null;
  }

  /**
   * Ask for the tiles in sight, most important first; requests for others are cancelled. A tile of
   * large cells takes long to compute, so it must be wanted for longer before it is asked for.
   */
  want(addresses: readonly Address[], cell: number): void {
    const missing = addresses.filter((address) => {
      const key = this.#key(address);
      return !this.#cache.has(key) && !this.#failed.has(key);
    });
    this.#queue.want(
      missing.map((address) => ({
        key: this.#key(address),
        run: (signal) => this.#load(address, signal),
      })),
      this.#empty ? 0 : Math.min(300, 50 + 8 * cell),
    );
  }

  close(): void {
    this.#queue.close();
  }

  async #load(address: Address, signal: AbortSignal): Promise<void> {
    const { level, x, y } = address;
    const cells = await this.#source.tile(this.#head, level, x, y, this.#pooling, signal);
    const tile: Tile = { cells, most: largest(cells), picture: null };
    this.#empty = false;
    this.#cache.set(this.#key(address), tile, cells.bits.length * BYTES_A_CELL);
    this.#changed();
  }

  #key({ level, x, y }: Address): string {
    const { input, group, layer, head } = this.#head;
    const { how, drop, of = '' } = this.#pooling;
    return [input, group, layer, head, how, drop, of, level, x, y].join('/');
  }
}

/** The picture of a tile, a pixel a cell, painted again only when the colours have changed. */
export function pictureOf(tile: Tile, table: Uint32Array): OffscreenCanvas {
  if (tile.picture?.table === table) return tile.picture.canvas;
  const { columns, rows } = tile.cells;
  const canvas = tile.picture?.canvas ?? new OffscreenCanvas(columns, rows);
  canvas.getContext('2d')!.putImageData(paint(tile.cells, table), 0, 0);
  tile.picture = { canvas, table };
  return canvas;
}

function largest({ bits, largest }: Cells): number {
  if (largest !== undefined) return largest; // of the whole map: its colours are the same anywhere
  let most = -Infinity;
  for (const bit of bits) most = Math.max(most, HALVES[bit]!);
  return 2 ** most;
}
