/** The weights that the colours span, and the colour of letters on them. */

import type { Mode, Scale, Span } from '../../lib/colour';
import { roundUp } from './numbers';

/** The span of colours for weights up to `most`, over so many keys. */
export function spanFor(scale: Scale, most: number, columns: number): Span {
  const high = most > 0 ? Math.min(1, roundUp(most)) : 1;
  // Three decades at least, and down to a tenth of an even share: a weight that is no more than
  // what chance gives still has a colour, whatever the length.
  const low = Math.min(high / 1000, 0.1 / Math.max(1, columns));
  return { scale, low, high };
}

/** The colour of letters on a colour of the palette, by its place in it. */
export function lettersOn(place: number, mode: Mode): string {
  return (mode === 'light') === place < 0.5 ? '#14161a' : '#ffffff';
}
