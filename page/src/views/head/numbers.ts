/** Round numbers: steps for axes, ends for colour ranges. */

/** The smallest of 1, 2, 5, 10, 20 … that is at least this. */
export function roundStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5].map((digit) => digit * power).find((step) => step >= least) ?? 10 * power;
}

/** The multiples of a step from one number to another, both included. */
export function multiples(step: number, from: number, to: number): number[] {
  const first = Math.ceil(from / step);
  const many = Math.max(0, Math.floor(to / step) - first + 1);
  return Array.from({ length: many }, (_, index) => (first + index) * step);
}

/** The next of 1, 1.5, 2, 3, 5, 7, 10 … (times a power of ten) that is at least this. */
export function roundUp(positive: number): number {
  const power = 10 ** Math.floor(Math.log10(positive));
  const enough = positive * (1 - 1e-3); // float16 may have rounded a weight of 1 up
  const digit = [1, 1.5, 2, 3, 5, 7].find((one) => one * power >= enough) ?? 10;
  return Number((digit * power).toPrecision(2));
}
