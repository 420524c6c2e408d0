/** The arithmetic of the head's map, without a browser; test_page_head.py runs it with Node. */

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import { test } from 'node:test';
import { Cache } from '../../../page/src/views/head/cache.ts';
import { Lines } from '../../../page/src/views/head/lines.ts';
import { boxOf, cellSize, levelFor, tilesWithin } from '../../../page/src/views/head/pyramid.ts';
import { Queue } from '../../../page/src/views/head/queue.ts';
import { fixedPoint } from '../../../page/src/views/head/view.ts';

/** A generator of numbers below a limit, the same ones each time. */
function random(seed: number): (below: number) => number {
  return (below) => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return Math.floor((seed / 2 ** 32) * below);
  };
}

test('every pair a causal mask shows lies in a tile, and no tile shows nothing', () => {
  const next = random(1);
  for (let run = 0; run < 300; run++) {
    const rows = 1 + next(5000);
    const columns = rows + next(50);
    const levels = 1 + Math.max(0, Math.ceil(Math.log2(columns / 256)));
    const pyramid = { rows, columns, levels, tile: 256, causal: true };
    const level = next(levels);
    const whole = { left: -9, top: -9, right: columns + 9, bottom: rows + 9 };
    const tiles = tilesWithin(pyramid, level, whole);
    const places = new Set(tiles.map(({ x, y }) => `${x} ${y}`));
    assert.equal(places.size, tiles.length);
    for (const tile of tiles) {
      const { left, bottom } = boxOf(pyramid, tile);
      assert.ok(left <= bottom - 1 + columns - rows);
    }
    const side = 256 * cellSize(pyramid, level);
    for (let pair = 0; pair < 30; pair++) {
      const row = next(rows);
      const key = next(row + columns - rows + 1);
      assert.ok(places.has(`${Math.floor(key / side)} ${Math.floor(row / side)}`));
    }
  }
});

test('a cell fills a pixel, and the next finer one would not', () => {
  const pyramid = { rows: 100_000, columns: 100_000, levels: 10, tile: 256, causal: true };
  for (let exponent = -14; exponent < 6; exponent += 0.37) {
    const pixels = 2 ** exponent;
    const level = levelFor(pyramid, pixels);
    if (level > 0) assert.ok(cellSize(pyramid, level) * pixels >= 0.999);
    if (level < 9) assert.ok(cellSize(pyramid, level + 1) * pixels < 1.001);
  }
});

test('what is chosen stays where it is while one zooms, and else the middle does', () => {
  const [view, size] = [{ scale: 2, x: -100, y: -300 }, { width: 600, height: 400 }];
  assert.deepEqual(fixedPoint(view, size, 200, 100), [101, 101]);
  assert.deepEqual(fixedPoint(view, size, 200, null), [300, 101]);
  assert.deepEqual(fixedPoint(view, size, 149, 400), [300, 200]); // both are out of sight
  assert.deepEqual(fixedPoint(view, size, null, null), [300, 200]);
});

test('the least recently used go first, and the bytes stay below their limit', () => {
  const cache = new Cache<number>(100);
  for (let number = 0; number < 50; number++) {
    cache.set(String(number), number, 10);
    cache.get('3');
    assert.ok(cache.bytes <= 100);
  }
  assert.equal(cache.get('3'), 3);
  assert.equal(cache.get('49'), 49);
  assert.equal(cache.get('4'), undefined);
});

test('six requests run at once, and those no longer wanted are cancelled', async () => {
  const [running, done, cancelled] = [new Set<string>(), [] as string[], [] as string[]];
  let most = 0;
  let end = () => {};
  const open = new Promise<void>((resolve) => (end = resolve));
  const request = (key: string) => ({
    key,
    run: async (signal: AbortSignal) => {
      running.add(key);
      most = Math.max(most, running.size);
      signal.addEventListener('abort', () => cancelled.push(key));
      await Promise.race([open, once(signal, 'abort')]);
      running.delete(key);
      if (!signal.aborted) done.push(key);
    },
  });
  const queue = new Queue((error) => assert.fail(String(error)));
  queue.want(Array.from({ length: 20 }, (_, number) => request(String(number))), 0);
  while (running.size < 6) await sleep(1);
  queue.want(['4', '18', '19'].map(request), 0);
  while (!running.has('19')) await sleep(1);
  end();
  while (queue.busy) await sleep(1);
  assert.equal(most, 6);
  assert.deepEqual(done.sort(), ['18', '19', '4']);
  assert.deepEqual(cancelled.sort(), ['0', '1', '2', '3', '5']);
});

test('what a zoom passes through is never asked for', async ({ mock }) => {
  mock.timers.enable({ apis: ['setTimeout'] });
  const asked: string[] = [];
  const queue = new Queue((error) => assert.fail(String(error)));
  for (let level = 0; level < 12; level++) {
    queue.want([{ key: String(level), run: async () => void asked.push(String(level)) }], 400);
    mock.timers.tick(2);
  }
  assert.deepEqual(asked, []);
  mock.timers.tick(400);
  assert.deepEqual(asked, ['11']);
});

test('lines hold every token once and keep words whole', () => {
  const next = random(2);
  const words = ['a', ' the', '\n', 'ing', ' longer', '', ' ', '好', 'x'.repeat(60)];
  for (let run = 0; run < 500; run++) {
    const width = 8 + next(40);
    const tokens = Array.from({ length: next(60) }, () => words[next(words.length)]!);
    const lines = new Lines(tokens, width, (token) => token.length);
    let last = 0;
    lines.all.forEach(({ start, stop }, line) => {
      assert.equal(start, last);
      assert.equal(lines.lineOf(start), line);
      assert.equal(lines.lineOf(stop - 1), line);
      const taken = tokens.slice(start, stop).map((token) => Math.min(width, token.length));
      assert.ok(stop === start + 1 || taken.reduce((one, other) => one + other, 0) <= width);
      last = stop;
    });
    assert.equal(last, tokens.length);
  }
  const lines = new Lines([' light', 'house', ' of', ' Mar', 'low'], 12, ({ length }) => length);
  assert.deepEqual(lines.all, [
    { start: 0, stop: 2 },
    { start: 2, stop: 5 },
  ]);
});
