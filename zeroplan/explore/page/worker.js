// Answers the page's questions in the reader's browser: zeroplan's own code, run by Python as WebAssembly.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const version = new URL(import.meta.url).searchParams.get("version");

async function begin() {
  const [python, archive] = await Promise.all([loadPyodide({ indexURL: "./pyodide/" }), fetch(`zeroplan-${version}.zip`)]);
  python.unpackArchive(await archive.arrayBuffer(), "zip", { extractDir: "/zeroplan" });
  python.runPython("import sys; sys.path.insert(0, '/zeroplan')");
  return python.pyimport("zeroplan.explore.questions").in_browser;
}

const ready = begin();

addEventListener("message", async ({ data: { id, address } }) => {
  try {
    const answer = (await ready)(address), [status, content] = answer.toJs();
    answer.destroy();
    postMessage({ id, status, content });
  } catch (error) {
    postMessage({ id, failed: String(error) });
  }
});
