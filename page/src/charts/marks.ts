/** The marks of a chart. */

/** One of the seven series colours. */
export type Colour = 0 | 1 | 2 | 3 | 4 | 5 | 6;

/** The shape of a measurement in each colour, within 3 of the origin: colours alone are not enough. */
export const SHAPES: Record<Colour, string> = {
  0: 'M-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0z',
  1: 'M-2.3 -2.3h4.6v4.6h-4.6z',
  2: 'M0 -3l2.9 5h-5.8z',
  3: 'M0 -3.2l3.2 3.2l-3.2 3.2l-3.2 -3.2z',
  4: 'M0 3l2.9 -5h-5.8z',
  5: 'M-1 -3h2v2h2v2h-2v2h-2v-2h-2v-2h2z',
  6: 'M-3 -1.6l1.4 -1.4l1.6 1.6l1.6 -1.6l1.4 1.4l-1.6 1.6l1.6 1.6l-1.4 1.4l-1.6 -1.6l-1.6 1.6l-1.4 -1.4l1.6 -1.6z',
};

export interface Line {
  kind: 'line';
  name: string;
  colour: Colour;
  points: readonly (readonly [number, number])[];
  /** Theory, limits and the like; what is measured is drawn through. Or a pattern of dashes. */
  dashed?: boolean | string;
  /** A mark at each measurement, in the shape of the colour. */
  dots?: boolean;
  faint?: boolean;
}

export interface Dots {
  kind: 'dots';
  name: string;
  colour: Colour;
  points: readonly (readonly [number, number])[];
}

/** The space between two lines: [x, low, high]. */
export interface Band {
  kind: 'band';
  name: string;
  colour: Colour;
  points: readonly (readonly [number, number, number])[];
}

/** A histogram: `values` has one entry fewer than `edges`. */
export interface Bins {
  kind: 'bins';
  name: string;
  colour: Colour;
  edges: readonly number[];
  values: readonly number[];
}

/** A line across at a height, with its name written on it. */
export interface Level {
  kind: 'level';
  name: string;
  y: number;
}

/** A line down at a place: where the sliders stand, or where something happened. */
export interface Moment {
  kind: 'moment';
  name: string;
  x: number;
  bad?: boolean;
  /** Only a tick on the axis, where there are many. */
  small?: boolean;
  /** Written at its head. */
  label?: string;
}

export type Mark = Line | Dots | Band | Bins | Level | Moment;

/** The readout at a place: the name and the number of each mark there. */
export interface Reading {
  name: string;
  colour: Colour;
  x: number;
  y: number;
}

/** The nearest measurement of each line and bin to x. */
export function readings(marks: readonly Mark[], x: number, distance: Distance): Reading[] {
  return marks.flatMap((mark): Reading[] => {
    if (mark.kind === 'line' && mark.points.length) {
      const near = mark.points.reduce((best, point) =>
        distance(point[0], x) < distance(best[0], x) ? point : best,
      );
      return [{ name: mark.name, colour: mark.colour, x: near[0], y: near[1] }];
    }
    if (mark.kind === 'bins') {
      const bin = mark.edges.findIndex((edge, index) => edge <= x && x < mark.edges[index + 1]!);
      if (bin < 0) return [];
      const middle = (mark.edges[bin]! + mark.edges[bin + 1]!) / 2;
      return [{ name: mark.name, colour: mark.colour, x: middle, y: mark.values[bin]! }];
    }
    return [];
  });
}

export type Distance = (one: number, other: number) => number;
