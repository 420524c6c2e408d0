/** All small maps on one canvas: a canvas a head would make a browser's compositor sweat. */

import { paint } from '../../lib/colour';
import type { Cells, HeadFigures } from '../../lib/types';
import type { Layout } from './layout';

const FRAME = 2; // around each map

/** Draw the maps where the layout has them, each as large as its square allows. */
export function drawSheet(
  canvas: HTMLCanvasElement,
  { tile, width, height, places }: Layout,
  cellsOf: (head: HeadFigures) => Cells | undefined,
  table: Uint32Array,
): void {
  const scale = devicePixelRatio;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext('2d')!;
  context.scale(scale, scale);
  const scratch = document.createElement('canvas');
  for (const [head, { x, y }] of places) {
    const cells = cellsOf(head);
    if (!cells) continue;
    scratch.width = cells.columns;
    scratch.height = cells.rows;
    scratch.getContext('2d')!.putImageData(paint(cells, table), 0, 0);
    const stretch = (tile - 2 * FRAME) / Math.max(cells.rows, cells.columns);
    context.imageSmoothingEnabled = stretch * scale < 1; // a cell may vanish only into others
    const [wide, high] = [cells.columns * stretch, cells.rows * stretch];
    context.drawImage(scratch, x + (tile - wide) / 2, y + (tile - high) / 2, wide, high);
  }
}
