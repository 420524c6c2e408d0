import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

const SERVER = process.env.HEADWISE_SERVER ?? 'http://127.0.0.1:8470';
const MARK = '<!-- the bundle -->';

/**
 * One script and one style sheet serve the page, the self-contained file and the notebook widget.
 * So they have fixed names and the script keeps its exports, which an HTML entry would lose;
 * index.html is written here, with their hashes as the versions that end a browser's cache.
 */
const writeIndex = {
  name: 'write-index',
  enforce: 'post', // after the style sheet has joined the bundle
  generateBundle(_, bundle) {
    const tags = Object.values(bundle).map((file) => {
      const content = file.type === 'chunk' ? file.code : file.source;
      const version = createHash('sha256').update(content).digest('hex').slice(0, 12);
      return file.type === 'chunk'
        ? `<script type="module" src="${file.fileName}?v=${version}"></script>`
        : `<link rel="stylesheet" href="${file.fileName}?v=${version}" />`;
    });
    const html = readFileSync(new URL('index.html', import.meta.url), 'utf8');
    const source = html.replace(MARK, tags.join('\n    '));
    this.emitFile({ type: 'asset', fileName: 'index.html', source });
  },
  // The development server knows no bundle.
  transformIndexHtml: (html) =>
    html.replace(MARK, '<script type="module" src="/src/main.ts"></script>'),
};

export default defineConfig({
  plugins: [svelte(), writeIndex],
  // To the server, the development server must look like its own page.
  server: {
    proxy: { '/api': { target: SERVER, changeOrigin: true, headers: { origin: SERVER } } },
  },
  build: {
    outDir: '../headwise/apps/look/static',
    emptyOutDir: false, // its files have fixed names, and a running server may be reading them
    target: 'es2022',
    cssCodeSplit: false,
    modulePreload: false,
    rolldownOptions: {
      input: 'src/main.ts',
      preserveEntrySignatures: 'strict',
      output: { entryFileNames: 'headwise.js', assetFileNames: 'headwise[extname]' },
    },
  },
});
