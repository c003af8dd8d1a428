// Writes the files that the service sends: node build.mjs [FOLDER].
// The output depends only on the sources and on package-lock.json, so that a test can compare it with the committed files.

import { copyFile, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import { build } from "esbuild";

const HERE = import.meta.dirname;
const OUT = path.resolve(process.argv[2] ?? path.join(HERE, "../src/penstock/serving/web_page"));
const LAZY = ["charts", "code", "math"]; // loaded with their first use
const LIBRARIES = ["dompurify", "highlight.js", "katex", "marked", "swagger-ui-dist", "uplot"];

// KaTeX sets some styles as attributes, which the content security policy blocks. It permits the same styles set as properties.
const SET_ATTRIBUTE = "node.setAttribute(attr, this.attributes[attr]);";
const SET_STYLE = `if (attr === "style") node.style.cssText = this.attributes[attr]; else ${SET_ATTRIBUTE}`;
const NUM_PLACES = 4;

const katex = {
  name: "katex",
  setup({ onLoad }) {
    onLoad({ filter: /katex\.mjs$/ }, async ({ path: file }) => {
      const pieces = (await readFile(file, "utf8")).split(SET_ATTRIBUTE);
      if (pieces.length !== NUM_PLACES + 1) throw new Error(`${file}: expected ${NUM_PLACES} places that set attributes, got ${pieces.length - 1}`);
      return { contents: pieces.join(SET_STYLE), loader: "js" };
    });
    // Every browser that runs the page reads woff2.
    onLoad({ filter: /katex\.css$/ }, async ({ path: file }) => {
      const css = await readFile(file, "utf8");
      return { contents: css.replace(/,\s*url\([^)]*\.(?:woff|ttf)\) format\([^)]*\)/g, ""), loader: "css" };
    });
  },
};

await rm(OUT, { recursive: true, force: true });
await mkdir(OUT, { recursive: true });
await build({
  absWorkingDir: HERE,
  entryPoints: ["src/main.ts", "src/docs.ts", "src/theme.ts", ...LAZY.map((name) => `src/${name}.ts`), "src/style/page.css", "src/style/docs.css"],
  outdir: OUT,
  entryNames: "[name]",
  assetNames: "[name]",
  bundle: true,
  external: LAZY.map((name) => `./${name}.js`),
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none", // licences.txt has them in full
  loader: { ".woff2": "file" },
  plugins: [katex],
  logLevel: "warning",
});
for (const name of ["index.html", "docs.html", "icon.svg"]) await copyFile(path.join(HERE, "src", name), path.join(OUT, name));

const notices = [];
for (const name of LIBRARIES) {
  const folder = path.join(HERE, "node_modules", name);
  const { version, license } = JSON.parse(await readFile(path.join(folder, "package.json"), "utf8"));
  const file = (await readdir(folder)).find((one) => /^licen[cs]e/i.test(one));
  notices.push(`${name} ${version} (${license})\n\n${(await readFile(path.join(folder, file), "utf8")).trim()}\n`);
}
await writeFile(path.join(OUT, "licences.txt"), `The scripts, styles and fonts in this folder contain these libraries.\n\n${notices.join(`\n${"-".repeat(80)}\n\n`)}`);
