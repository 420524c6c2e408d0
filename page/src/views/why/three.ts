/** Attention over three tokens of two numbers, as in the handbook's first chapter. */

export type Matrix = readonly (readonly number[])[];

/** The tokens, and the matrices that make queries, keys and values of them. */
export const NAMES = ['x', 'wq', 'wk', 'wv'] as const;
export type Given = Record<(typeof NAMES)[number], Matrix>;

export const START: Given = {
  x: [
    [1, 0],
    [0, 1],
    [1, 1],
  ],
  wq: [
    [1, 0],
    [1, 1],
  ],
  wk: [
    [0, 1],
    [1, 0],
  ],
  wv: [
    [2, 0],
    [0, 1],
  ],
};

export interface Attended {
  q: Matrix;
  k: Matrix;
  v: Matrix;
  /** q·k of every query and key; null where the mask hides the key. */
  scores: (number | null)[][];
  /** What enters softmax: the scores, divided if they are to be. */
  logits: (number | null)[][];
  weights: Matrix;
  output: Matrix;
}

/** softmax(Q Kᵀ / √d) V, with every step kept. */
export function attend({ x, wq, wk, wv }: Given, scaled: boolean, causal: boolean): Attended {
  const [q, k, v] = [product(x, wq), product(x, wk), product(x, wv)];
  const scores = q.map((query, i) => k.map((key, j) => (causal && j > i ? null : dot(query, key))));
  const divisor = scaled ? Math.sqrt(2) : 1;
  const logits = scores.map((row) => row.map((score) => score && score / divisor));
  const weights = logits.map(softmax);
  return { q, k, v, scores, logits, weights, output: product(weights, v) };
}

/** The largest is taken off first, so that no exponential overflows. */
export function softmax(logits: readonly (number | null)[]): number[] {
  const largest = Math.max(...logits.filter((each) => each !== null));
  const raised = logits.map((each) => (each === null ? 0 : Math.exp(each - largest)));
  const sum = raised.reduce((total, each) => total + each, 0);
  return raised.map((each) => each / sum);
}

/** Numbers from an address, row by row; `otherwise` where they are not all there. */
export function matrixOf(text: string, otherwise: Matrix): Matrix {
  const numbers = text.split(',').map(Number);
  const wanted = otherwise.length * 2;
  if (text === '' || numbers.length !== wanted || !numbers.every(isSmall)) return otherwise;
  return otherwise.map((_, row) => numbers.slice(2 * row, 2 * row + 2));
}

export const isSmall = (value: number) => Number.isFinite(value) && Math.abs(value) <= 99;

function dot(a: readonly number[], b: readonly number[]): number {
  return a.reduce((sum, each, at) => sum + each * b[at]!, 0);
}

function product(a: Matrix, b: Matrix): number[][] {
  return a.map((row) =>
    b[0]!.map((_, column) =>
      dot(
        row,
        b.map((each) => each[column]!),
      ),
    ),
  );
}
