/** The weights that the colours span, and the colour of letters on them. */

import { logSpan, type Mode, type Span } from '../../lib/colour';
import { roundUp } from './numbers';

/** The span of colours over so many keys; a linear one ends at the largest weight or sum, `most`. */
export function spanFor(scale: Span['scale'], most: number, columns: number): Span {
  if (scale === 'log') return logSpan(columns);
  if (scale === 'signed') return { scale, low: -most, high: most };
  const high = roundUp(most);
  return { scale, low: 0, high: most > 1 ? high : most > 0 ? Math.min(1, high) : 1 };
}

/** The colour of letters on a colour of the palette, by its place in it. */
export function lettersOn(place: number, mode: Mode): string {
  return (mode === 'light') === place < 0.5 ? '#14161a' : '#ffffff';
}
