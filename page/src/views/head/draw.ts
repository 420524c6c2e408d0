/** The map on its canvas: the finest tiles that are here, over coarser ones while those load. */

import {
  boxOf,
  cellSize,
  parent,
  tilesWithin,
  type Address,
  type Box,
  type Pyramid,
} from './pyramid';
import { pictureOf, type Tile } from './tiles';
import { boxIn, type Size, type View } from './view';

type At = (address: Address) => Tile | undefined;

/** Where the plot lies on the canvas, in CSS pixels. */
export interface Frame extends Size {
  readonly left: number;
  readonly top: number;
}

/**
 * Draw a level of the map. Edges are rounded to whole device pixels, so that tiles meet without a
 * seam at any zoom and on any screen.
 */
export function drawTiles(
  context: CanvasRenderingContext2D,
  frame: Frame,
  view: View,
  ratio: number,
  pyramid: Pyramid,
  level: number,
  at: At,
  table: Uint32Array,
): void {
  const column = (token: number) => Math.round((frame.left + view.x + token * view.scale) * ratio);
  const row = (token: number) => Math.round((frame.top + view.y + token * view.scale) * ratio);
  context.save();
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.beginPath();
  context.rect(
    Math.round(frame.left * ratio),
    Math.round(frame.top * ratio),
    Math.round(frame.width * ratio),
    Math.round(frame.height * ratio),
  );
  context.clip();
  context.imageSmoothingEnabled = false;
  for (const address of tilesWithin(pyramid, level, boxIn(view, frame))) {
    const found = nearest(address, at);
    if (found === null) continue;
    const box = boxOf(pyramid, address);
    const [left, top] = [column(box.left), row(box.top)];
    const from = within(pyramid, box, found.address);
    context.drawImage(
      pictureOf(found.tile, table),
      from.left,
      from.top,
      from.right - from.left,
      from.bottom - from.top,
      left,
      top,
      column(box.right) - left,
      row(box.bottom) - top,
    );
  }
  context.restore();
}

/** The tile itself, or the closest coarser one that is here. */
function nearest(address: Address, at: At): { address: Address; tile: Tile } | null {
  for (let place: Address | null = address; place !== null; place = parent(place)) {
    const tile = at(place);
    if (tile) return { address: place, tile };
  }
  return null;
}

/** A box of tokens in the cells of a tile that covers it. */
function within(pyramid: Pyramid, box: Box, address: Address): Box {
  const cell = cellSize(pyramid, address.level);
  const { left, top } = boxOf(pyramid, address);
  return {
    left: (box.left - left) / cell,
    top: (box.top - top) / cell,
    right: (box.right - left) / cell,
    bottom: (box.bottom - top) / cell,
  };
}
