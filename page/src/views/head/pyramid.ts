/** A map as a pyramid of tiles: which cells a level has, and which tiles a view needs. */

/** The pyramid of one head: level 0 is one tile, each level doubles the resolution. */
export interface Pyramid {
  readonly rows: number;
  readonly columns: number;
  readonly levels: number;
  /** Cells along each side of a tile. */
  readonly tile: number;
  readonly causal: boolean;
}

/** Tile x of the keys and y of the rows, at a level. */
export interface Address {
  readonly level: number;
  readonly x: number;
  readonly y: number;
}

/** A rectangle of the map, counted in tokens: keys go right, rows go down. */
export interface Box {
  readonly left: number;
  readonly top: number;
  readonly right: number;
  readonly bottom: number;
}

/** The number of tokens along each side of a cell of this level. */
export function cellSize(pyramid: Pyramid, level: number): number {
  return 2 ** (pyramid.levels - 1 - level);
}

/**
 * The level to draw at: the finest whose cells still fill a pixel, so that no weight falls between
 * two pixels.
 */
export function levelFor(pyramid: Pyramid, pixelsPerToken: number): number {
  const halvings = Math.max(0, Math.ceil(-Math.log2(pixelsPerToken) - 1e-6));
  return Math.max(0, pyramid.levels - 1 - halvings);
}

/** The box that a tile covers. */
export function boxOf(pyramid: Pyramid, { level, x, y }: Address): Box {
  const side = pyramid.tile * cellSize(pyramid, level);
  return {
    left: x * side,
    top: y * side,
    right: Math.min(pyramid.columns, (x + 1) * side),
    bottom: Math.min(pyramid.rows, (y + 1) * side),
  };
}

/** True if a causal mask hides all of a box: its last row comes before its first key. */
export function isHidden(pyramid: Pyramid, box: Box): boolean {
  const ahead = pyramid.columns - pyramid.rows; // the rows are the last of the sequence
  return pyramid.causal && box.left > box.bottom - 1 + ahead;
}

/** The tiles of a level that show something of a box, those nearest to its middle first. */
export function tilesWithin(pyramid: Pyramid, level: number, box: Box): Address[] {
  const side = pyramid.tile * cellSize(pyramid, level);
  const [left, right] = span(box.left, box.right, pyramid.columns, side);
  const [top, bottom] = span(box.top, box.bottom, pyramid.rows, side);
  const found: Address[] = [];
  for (let y = top; y < bottom; y++) {
    for (let x = left; x < right; x++) {
      const address = { level, x, y };
      if (!isHidden(pyramid, boxOf(pyramid, address))) found.push(address);
    }
  }
  const middleX = (box.left + box.right) / 2 / side - 0.5;
  const middleY = (box.top + box.bottom) / 2 / side - 0.5;
  const distance = ({ x, y }: Address) => Math.hypot(x - middleX, y - middleY);
  return found.sort((one, other) => distance(one) - distance(other));
}

/** The tile a level up that covers this one, or null at the top. */
export function parent({ level, x, y }: Address): Address | null {
  return level === 0 ? null : { level: level - 1, x: x >> 1, y: y >> 1 };
}

/** The part of the box that is part of the map. */
export function clip(box: Box, pyramid: Pyramid): Box {
  return {
    left: Math.max(0, box.left),
    top: Math.max(0, box.top),
    right: Math.min(pyramid.columns, box.right),
    bottom: Math.min(pyramid.rows, box.bottom),
  };
}

function span(from: number, to: number, length: number, side: number): [number, number] {
  return [Math.max(0, Math.floor(from / side)), Math.ceil(Math.min(to, length) / side)];
}
