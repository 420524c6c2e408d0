/** English and 中文: each view keeps its own words in src/locales. */

export type Language = 'en' | 'zh';

const KEY = 'headwise.language';

class Speech {
  current = $state<Language>(initial());

  choose(language: Language): void {
    this.current = language;
    remember(KEY, language);
  }
}

function initial(): Language {
  const kept = recall(KEY);
  if (kept === 'en' || kept === 'zh') return kept;
  return navigator.language.toLowerCase().startsWith('zh') ? 'zh' : 'en';
}

/** A browser may forbid storage (a private window, a file, a notebook's frame): then nothing is kept. */
export function remember(key: string, value: string): void {
  try {
    localStorage.setItem(key, value);
  } catch {
    /* the choice holds until the page is closed */
  }
}

export function recall(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** The language of the page, everywhere. */
export const speech = new Speech();

/** Words in both languages: the same keys, texts or functions that make a text. */
export function dictionary<Words extends object>(en: Words, zh: NoInfer<Words>): () => Words {
  return () => (speech.current === 'zh' ? zh : en);
}

/** A number as people write it: 12,345 and 0.0123, never 0.012300000001. */
export function written(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return '—';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  if (Number.isInteger(value)) return value.toLocaleString('en').replace('-', '−');
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(digits - 1).replace('-', '−');
  return value
    .toLocaleString('en', { maximumSignificantDigits: size >= 10 ** digits ? 6 : digits })
    .replace('-', '−');
}

/** A share as a percentage: 4.2% of a weight; never more digits than it has. */
export function percent(share: number): string {
  const value = 100 * share;
  return value !== 0 && Math.abs(value) < 0.01
    ? '<0.01%'
    : `${written(Number(value.toFixed(2)), 3)}%`;
}
