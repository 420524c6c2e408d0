/** A text of tokens broken into lines of equal height, so that only those in sight need be drawn. */

/** Tokens `start` up to, without it, `stop`. */
export interface Line {
  readonly start: number;
  readonly stop: number;
}

/** Breaks tokens into lines: 100,000 of them in a few milliseconds. */
export class Lines {
  readonly #width: number;
  readonly #measure: (token: string) => number;
  readonly #widths = new Map<string, number>();
  readonly #lines: Line[] = [];
  #start = 0;
  #used = 0;
  /** Where the last word of the line starts, and how much stands before it. */
  #word = 0;
  #before = 0;

  /** `width` is the width of a line, `measure` gives that of a token. */
  constructor(tokens: readonly string[], width: number, measure: (token: string) => number) {
    this.#width = width;
    this.#measure = measure;
    tokens.forEach((token, index) => {
      const size = this.#size(token);
      if (/^\s/.test(token)) {
        this.#word = index;
        this.#before = this.#used;
      }
      while (this.#used > 0 && this.#used + size > this.#width) {
        // A word of several tokens stays whole, unless it is wider than a line.
        if (this.#word > this.#start) this.#break(this.#word, this.#used - this.#before);
        else this.#break(index);
      }
      this.#used += size;
      if (token.includes('\n')) this.#break(index + 1);
    });
    if (this.#start < tokens.length) this.#break(tokens.length);
  }

  get all(): readonly Line[] {
    return this.#lines;
  }

  /** The number of the line that a token stands on. */
  lineOf(token: number): number {
    let first = 0;
    let last = this.#lines.length - 1;
    while (first < last) {
      const middle = (first + last + 1) >> 1;
      if ((this.#lines[middle]?.start ?? Infinity) <= token) first = middle;
      else last = middle - 1;
    }
    return first;
  }

  #break(next: number, used = 0): void {
    this.#lines.push({ start: this.#start, stop: next });
    this.#start = next;
    this.#used = used;
    this.#word = next;
    this.#before = 0;
  }

  #size(token: string): number {
    let size = this.#widths.get(token);
    if (size === undefined) {
      size = Math.min(this.#width, this.#measure(token));
      this.#widths.set(token, size);
    }
    return size;
  }
}

/** A token as it is shown: what would be invisible gets a sign. */
export function shown(token: string): string {
  if (token === '') return '·'; // continues the character of the token before
  const signed = token.replaceAll('\n', '↵').replaceAll('\t', '⇥');
  return signed.trim() === '' ? signed.replaceAll(' ', '␣') : signed;
}
