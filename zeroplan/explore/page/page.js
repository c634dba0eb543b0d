"use strict";
// Draws what the server answers. Every number on the page is one of the answer's; nothing is computed here but where to put it.

const GB = 1e9, GIB = 2 ** 30, TYPING_MS = 60, WAIT_MS = 60, CALM_MS = 120, LONG_CALM_MS = 500;
const SVG = "http://www.w3.org/2000/svg";
const of = (id) => document.getElementById(id);
const state = { colours: {}, controls: [], asked: 0, timer: 0, settled: true, pushing: false };
const IN_BROWSER = document.body.classList.contains("in-browser");
const GONE = IN_BROWSER ? "Python did not start in this browser. Reload the page, or install zeroplan." : "The zeroplan server does not answer. Start `zeroplan explore` again.";
const STARTING = "Starting Python (7 MB, once)…";
const NO_FILES = "In the browser alone, zeroplan opens only a model's config.json. Install it and run `zeroplan explore` for snapshots and traces.";
const BROKEN = "zeroplan itself failed on these settings. Please report it with the address of this page.";

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function size(bytes) {
  const [unit, binary, name, other] = bytes >= GB / 10 || bytes === 0 ? [GB, GIB, "GB", "GiB"] : [1e6, 2 ** 20, "MB", "MiB"];
  return `${(bytes / binary).toFixed(2)} ${other} = ${(bytes / unit).toFixed(2)} ${name}`;
}
const gb = (bytes) => (bytes / GB).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const gib = (bytes) => (bytes / GIB).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

/** Few digits, for a label in a picture. */
const short = (bytes) => (bytes >= GIB / 10 || bytes === 0 ? `${(bytes / GIB).toFixed(bytes < 10 * GIB ? 2 : 1)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`);

/** A message for this page: flags, and fields before an equals sign, by the names of their controls. A report has no controls, and keeps them. */
const worded = (text) => text.replace(/(?<![\w.-])(?:--([a-z]+(?:-[a-z]+)*)|([a-z_]+)(?==))/g, (found, flag, field) => labelled(field || flag.replaceAll("-", "_")) || found);
const labelled = (name) => state.controls.filter((one) => one.name === name).map((one) => `\u201c${one.label}\u201d`)[0];

// --- the controls -------------------------------------------------------------------------------------------------------------

function fieldOf(control) {
  const id = `c-${control.name}`, field = node("div", { class: "field" });
  if (control.name === "stage") field.append(...stagesField(control, id));
  else if (control.kind === "choice") field.append(choiceField(control, id));
  else if (control.kind === "text") field.append(...textField(control, id));
  else field.append(...numberField(control, id));
  if (control.name !== "stage") field.prepend(node("label", { for: id }, control.label));
  if (control.name === "seq_len") field.append(node("button", { type: "button", id: "longest", "aria-describedby": "longest-said" }, "Longest that fits"), node("p", { class: "hint", id: "longest-said", role: "status" }));
  if (control.hint) {
    field.append(node("p", { class: "hint", id: `${id}-hint` }, control.hint));
    field.querySelector(`#${id}`).setAttribute("aria-describedby", `${id}-hint`);
  }
  return field;
}

/** What each stage shards, beside what the one before it does (Rajbhandari et al. 2020). */
const SHARDED = { 0: "shards nothing", 1: "optimizer state", 2: "+ grads", 3: "+ params" };

function stagesField(control, id) {
  const name = node("p", { class: "name", id: `${id}-name` }, control.label); // no label: a click on it would choose a stage
  const group = node("div", { class: "stages", role: "radiogroup", "aria-labelledby": `${id}-name` });
  for (const choice of control.choices) {
    const input = node("input", { type: "radio", name: control.name, value: choice, id: `${id}-${choice}` });
    group.append(node("span", {}, input, node("label", { for: `${id}-${choice}` }, choice, node("small", {}, SHARDED[choice] || ""))));
  }
  return [name, group];
}

function choiceField(control, id) {
  const select = node("select", { id, name: control.name });
  for (const choice of control.choices) select.append(node("option", { value: choice }, choice || control.empty));
  return select;
}

function textField(control, id) {
  const list = node("datalist", { id: `${id}-list` });
  for (const choice of control.choices) list.append(node("option", { value: choice }));
  return [node("input", { type: "text", id, name: control.name, list: `${id}-list`, spellcheck: "false" }), list];
}

function numberField(control, id) {
  const steps = Math.round(Math.log2(control.most / control.least));
  const slide = node("input", { type: "range", min: 0, max: steps, step: 1, "aria-label": `${control.label}, in doublings`, id: `${id}-slide` });
  const count = node("input", { type: "text", inputmode: "numeric", class: "count", id, name: control.name });
  slide.addEventListener("input", () => { count.value = control.least * 2 ** slide.value; place(control, count, slide); });
  count.addEventListener("input", () => { place(control, count, slide); });
  return [slide, count];
}

function place(control, count, slide) {
  const value = Number(count.value);
  if (value >= control.least) slide.value = Math.round(Math.log2(value / control.least));
  slide.setAttribute("aria-valuetext", count.value);
}

/** Always in sight, in this order; all others are under More. */
const PINNED = ["stage", "gpus", "seq_len", "model", "gpu"];

function build(told) {
  Object.assign(state, { colours: told.colours, hatches: told.hatches, engines: told.engines, controls: told.controls, describe: told.describe, stageColours: told.stages });
  const pinned = node("fieldset", {}, node("legend", {}, "The job")), groups = new Map();
  const byName = new Map(told.controls.map((one) => [one.name, one]));
  pinned.append(...PINNED.map((name) => fieldOf(byName.get(name))));
  for (const control of told.controls) {
    if (PINNED.includes(control.name)) continue;
    if (!groups.has(control.group)) groups.set(control.group, node("fieldset", {}, node("legend", {}, control.group)));
    groups.get(control.group).append(fieldOf(control));
  }
  pinned.querySelector(".stages").parentElement.classList.add("whole");
  const summary = node("summary", {}, "More: recipe, batch, parallelism ", node("span", { class: "changed", id: "changed" }));
  of("controls").append(pinned, node("details", { id: "more" }, summary, ...groups.values()));
  restore();
  of("controls").addEventListener("input", moved);
  of("controls").addEventListener("change", () => { state.settled = true; });
  of("controls").addEventListener("submit", (event) => event.preventDefault());
  of("asked").addEventListener("submit", (event) => { event.preventDefault(); plan(); });
  of("asked-why").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
  of("longest").addEventListener("click", longest);
  of("skip").addEventListener("click", (event) => { event.preventDefault(); of("answer").focus(); });
  addEventListener("hashchange", () => { if (!namesAPlace()) { restore(); ask(addressed()); } });
}

/** Until a stage is chosen, one GPU has none and several share everything, as on the command line. */
function stageOfGpus(control) {
  if (control.name === "stage") state.stageChosen = true;
  const alone = of("controls").elements.gpus.value.trim() === "1";
  if (!state.stageChosen && ["c-gpus", "c-gpus-slide"].includes(control.id)) of(`c-stage-${alone ? 0 : 3}`).checked = true;
}

/**
 * Ask: at once after a choice or a move of a slider, and a moment later while a text is typed, which is not yet a name or a number.
 * The first move after a control was left begins a new entry of the browser's history, for Back to return from.
 */
function moved(event) {
  busy(true);
  stageOfGpus(event.target);
  if (state.settled) Object.assign(state, { settled: false, pushing: true });
  clearTimeout(state.timer);
  if (event.target.type !== "text") { soon(); return; }
  if (event.target.name === "model") of("controls").elements.config.value = ""; // a model that is named takes the place of a config.json
  state.asked++; // an answer that is still on its way is to what stood there before
  state.timer = setTimeout(ask, TYPING_MS);
}

/** One question at a time: what a slider passes while an answer is on its way is skipped, so that answers never queue. */
async function soon() {
  if (state.flying) { state.again = true; return; }
  state.flying = true;
  try { await ask(); } finally { state.flying = false; }
  if (state.again) { state.again = false; soon(); }
}

/** Whether the address names a part of the page, as `#answer` does, and no job. */
const namesAPlace = () => location.hash.length > 1 && !location.hash.includes("=");
const inAddress = () => new URLSearchParams(namesAPlace() ? "" : location.hash.slice(1));

/** Set the controls to the job of the address. */
function restore() {
  const said = inAddress();
  state.stageChosen = said.has("stage");
  for (const control of state.controls) {
    const left = said.size && control.default && (control.choices.includes("") || (control.name === "model" && said.has("config")));
    const value = said.has(control.name) ? said.get(control.name) : left ? "" : control.default;
    const found = of("controls").elements[control.name];
    found.value = value;
    if (control.kind === "number") place(control, found, of(`c-${control.name}-slide`));
  }
}

/** The job of the controls, and what the address says that no control can show: the server says what is wrong with that. */
function addressed() {
  const values = said();
  for (const [name, value] of inAddress()) if (value.trim()) values.set(name, value.trim());
  return values;
}

/** How many controls under More are not at their defaults, beside its name. */
function countChanged() {
  const moved = state.controls.filter((one) => !PINNED.includes(one.name) && of("controls").elements[one.name].value.trim() !== one.default);
  of("changed").textContent = moved.length ? `(${moved.length} changed)` : "";
}

function said() {
  const values = new URLSearchParams();
  for (const control of state.controls) {
    const value = of("controls").elements[control.name].value.trim();
    if (value) values.set(control.name, value);
  }
  return values;
}

// --- asking -------------------------------------------------------------------------------------------------------------------

const main = document.querySelector("main");
const busy = (asking) => of("answer").setAttribute("aria-busy", String(asking));

/** Asks the server; on a page without one, Python in a worker of this browser. Both give a Response. */
const send = IN_BROWSER ? toWorker() : fetch.bind(window);

function toWorker() {
  const script = `worker.js?version=${document.currentScript.dataset.version}`, waiting = new Map(), workers = {};
  const kept = (name) => fetch(name).then((found) => found.json()).catch(() => ({})); // answers for the page's first job, to show at once
  const first = kept("first.json");
  let more, asked = 0, broken = false, started = false;
  const settle = (id, how, what) => { started ||= how === "answer"; waiting.get(id)[how](what); waiting.delete(id); };
  const made = () => {
    const worker = new Worker(script, { type: "module" });
    worker.addEventListener("message", ({ data: { id, failed, content, status } }) => (failed ? settle(id, "fail", failed) : settle(id, "answer", new Response(content, { status }))));
    worker.addEventListener("error", () => { broken = true; for (const id of [...waiting.keys()]) settle(id, "fail", GONE); });
    return worker;
  };
  const workerOf = (lane) => (workers[lane] ??= made());
  for (const event of ["pointerover", "focusin"]) of("controls").addEventListener(event, () => workerOf("quick"), { once: true }); // who only looks loads no Python
  return async (address, { body } = {}) => {
    if (body) return new Response(JSON.stringify({ error: NO_FILES }), { status: 422 });
    const known = (await first)[address] || (await (more ??= kept("more.json")))[address];
    if (known) return new Response(known);
    if (!started) of("headline").textContent = STARTING;
    const lane = /\/(scaling|changes|longest|message|report)\?/.test(address) ? "slow" : "quick"; // which take seconds, in a Python of their own
    return new Promise((answer, fail) => {
      if (broken) { fail(GONE); return; }
      waiting.set(++asked, { answer, fail });
      workerOf(lane).postMessage({ id: asked, address });
    });
  };
}

/** The server's answer, or `error`: one line that says why there is none. */
async function fetched(path, how = {}) {
  let response;
  try {
    response = await send(path, how);
  } catch {
    return { error: GONE };
  }
  try {
    const told = await response.json();
    return response.ok ? told : { error: told.error || BROKEN };
  } catch {
    return { error: BROKEN };
  }
}

async function ask(query = said()) {
  busy(true);
  countChanged();
  const mine = ++state.asked;
  remember(query);
  of("layouts").classList.toggle("stale", state.planned !== undefined && state.planned !== described(query));
  const told = await fetched(`/api/answer?${query}`);
  if (mine !== state.asked) return;
  if (told.error) { refuse(told.error); return; }
  show(told);
  toSave(query);
  clearTimeout(state.calm);
  clearTimeout(state.longCalm);
  state.calm = setTimeout(() => details(query, mine), state.before ? CALM_MS : 0);
  state.longCalm = setTimeout(() => moreGpus(query, mine), state.before ? LONG_CALM_MS : 0);
}

/** Where the files of this job are to be had. */
function toSave(query) {
  of("save-report").href = `/api/report?${query}`;
  for (const picture of ["stages", "timeline", "scaling"]) of(`save-${picture}`).href = `/api/picture?picture=${picture}&${query}`;
}

/** Save the report that Python made in this browser, where no server hands it out. */
async function saveReport(event) {
  event.preventDefault();
  const address = new URL(of("save-report").href), made = await send(address.pathname + address.search);
  if (!made.ok) return;
  const link = node("a", { href: URL.createObjectURL(await made.blob()), download: "zeroplan-report.html" });
  link.click();
  URL.revokeObjectURL(link.href);
}
if (IN_BROWSER) of("save-report").addEventListener("click", saveReport);

/** What takes longer than the answer, and is asked for where no next move follows within a moment. */
function details(query, mine) {
  if (mine !== state.asked) return;
  step(query, mine);
  if (["does not fit", "tight"].includes(state.told.estimate.verdict)) changes(query, mine);
}

/** The job on other numbers of GPUs, which takes a second or more near the limit: once its place is nearly in sight. */
async function moreGpus(query, mine) {
  state.later = undefined;
  if (mine !== state.asked) return;
  if (of("plan").getBoundingClientRect().top > 2 * innerHeight) {
    of("scaling-part").hidden = true; // it shows another job
    state.later = [query, mine];
    return;
  }
  const told = await fetched(`/api/scaling?${query}`);
  if (mine !== state.asked || told.error) return;
  scaling(told);
}

/** The step, request by request. */
async function step(query, mine) {
  const told = await fetched(`/api/step?${query}`);
  if (mine !== state.asked || told.error) return;
  showStep(told.step);
}

/** Keep the job in the address: in a new entry of the history where a move began, so that Back undoes it. */
function remember(query) {
  const address = `#${query}`;
  if (state.pushing && address !== location.hash) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  state.pushing = false;
}

async function changes(query, mine) {
  const told = await fetched(`/api/changes?${query}`);
  if (mine !== state.asked || told.error) return;
  judge(told.verdict, told.fits);
  showChanges(told.changes);
}

/** Set the sequence to the longest that fits this job. */
async function longest() {
  const query = said(), mine = state.asked;
  of("longest-said").textContent = "Searching…";
  const told = await fetched(`/api/longest?${query}`);
  if (mine !== state.asked) { of("longest-said").textContent = ""; return; } // the job is another by now
  of("longest-said").textContent = told.error ? worded(told.error) : lengthsWords(told);
  if (told.error || !told.tightly) return;
  query.set("seq_len", told.fits || told.tightly);
  location.hash = query;
}

function lengthsWords({ fits, tightly, most }) {
  const tokens = (count) => `${count.toLocaleString("en")} tokens`;
  if (!tightly) return "No length fits.";
  if (fits === most) return `All ${tokens(most)} that the model can read fit.`;
  return fits ? `Up to ${tokens(fits)} fit${tightly > fits ? `; tightly, up to ${tightly.toLocaleString("en")}` : ""}.` : `Up to ${tokens(tightly)} fit, tightly.`;
}

/** What torch's message means for the job of the controls. */
async function explain() {
  const text = messageIn(of("message").value);
  if (!text) { of("why-said").textContent = "Paste the message first; it has the words “out of memory”."; return; }
  const query = said();
  query.set("message", text);
  of("why-said").textContent = "Comparing it with the job…";
  const told = await fetched(`/api/message?${query}`);
  of("why-said").textContent = told.error ? worded(told.error) : "";
  of("why").hidden = Boolean(told.error);
  of("why").textContent = told.error ? "" : worded(told.text);
  listed("why-others", (told.others || []).filter((one) => one.said).map(other));
  listed("why-changes", of("fixes").hidden ? (told.changes || []).map(change) : []); // those above are the same
}

function listed(id, found) {
  of(id).hidden = !found.length;
  of(id).querySelector("ul").replaceChildren(...found.map((one) => node("li", {}, one)));
}

function other(one) {
  const made = node("button", { type: "button" }, node("code", {}, one.flags));
  made.addEventListener("click", () => loaded(one.said));
  return made;
}

const LONGEST_MESSAGE = 1500;

/** The last message of torch in a text, short enough for an address; empty if there is none. */
function messageIn(text) {
  const at = text.toLowerCase().lastIndexOf("out of memory");
  return at < 0 ? "" : text.slice(Math.max(0, at - 40), at + LONGEST_MESSAGE);
}

const described = (query) => state.describe.map((name) => query.get(name) || "").join(" ");

async function plan() {
  if (searching()) return;
  const query = said(), job = described(query);
  if (of("p-batch").value.trim()) query.set("global_batch", of("p-batch").value.trim());
  query.set("objective", of("p-objective").value);
  if (of("p-file").value) query.set("file", of("p-file").value);
  searching(true);
  of("plan-said").textContent = "Searching…";
  const told = await fetched(`/api/plan?${query}`);
  searching(false);
  if (told.error) { clearPlan(); of("plan-said").textContent = worded(told.error); }
  else { state.planned = job; of("layouts").classList.remove("stale"); showPlan(told); }
}

/** Whether a search goes on; the button only says so, since one that is disabled loses the focus. */
function searching(now) {
  if (now !== undefined) of("p-find").setAttribute("aria-disabled", String(now));
  return of("p-find").getAttribute("aria-disabled") === "true";
}

/** Show why there is no answer instead of the verdict, and for which job the figures below are. */
function refuse(why) {
  of("error").textContent = worded(why);
  of("error").hidden = false;
  main.classList.remove("waiting");
  main.classList.add("stale");
  of("headline").textContent = state.told ? `No answer for these settings. The figures below are for: ${state.told.headline}` : "";
  judge("", null);
  showChanges([]);
  busy(false);
}

// --- showing ------------------------------------------------------------------------------------------------------------------

function show(told) {
  if (opened()) closeFile();
  state.before = state.told;
  state.told = told;
  of("error").hidden = true;
  main.classList.remove("stale", "empty", "waiting");
  of("headline").textContent = told.headline;
  of("job").textContent = told.job;
  judge(told.verdict, told.estimate.fits, told.estimate.verdict === "tight" && !told.estimate.replay);
  showChanges([]);
  bar(told, state.before);
  stages(told.stages, told.speeds, told.estimate.job.recipe.zero_stage);
  figures(told.estimate, told.speed);
  state.step = undefined;
  of("timeline").setAttribute("aria-busy", "true");
  ledger(told.estimate);
  sent(told.estimate.communication, told.estimate.job.mesh);
  files(told.configurations);
  of("command").textContent = told.command;
  of("notes").replaceChildren(...told.estimate.notes.map((note) => node("li", {}, worded(note))));
  busy(false);
}

function figures(estimate, speed) {
  const rows = [
    ["Peak allocated", size(estimate.peak.allocated_bytes), "peak"],
    ["at this moment", estimate.peak.moment, "moment"],
    ["Model states", size(estimate.states.total_bytes), "states"],
    ["Reserved, as expected", size(estimate.reserved.expected_bytes), "reserved"],
  ];
  if (estimate.host_bytes) rows.push(["Host memory per rank", size(estimate.host_bytes), "host"]);
  const fitted = estimate.fits === false ? ", if it fitted" : "";
  if (speed.refusal) rows.push(["Speed", worded(speed.refusal), "speed"]);
  else rows.push([`Training speed${fitted}`, perGpu(speed), "speed"], [`Time of a step${fitted}`, perStep(speed), "step"]);
  of("figures").replaceChildren(...rows.map(([what, value, id]) => node("div", {}, node("dt", {}, what), node("dd", { id: `figure-${id}` }, id === "peak" ? node("strong", {}, value) : value))));
}

const perStep = (speed) => `${speed.step_s.toPrecision(3)} s`;
const perGpu = (speed) => `${Math.round(speed.tokens_per_s_per_gpu).toLocaleString("en")} tokens/s per GPU`;

/** The verdict, large; what follows its first sentence, small. In the colour of what it says, once a replay has confirmed it. */
function judge(words, fits, provisional = false) {
  const [first, ...more] = words.split(/(?<=\.) /);
  if (provisional) more.push("Provisional: the allocator's requests are being replayed…");
  of("verdict").replaceChildren(first, ...(more.length ? [node("small", {}, more.join(" "))] : []));
  of("verdict").className = provisional ? "" : fits === true ? "fits" : fits === false ? "not" : "";
}

/** Changes that would make it fit: a button that makes each, with what it costs. */
function showChanges(found) {
  of("fixes").hidden = !found.length;
  of("changes").replaceChildren(...found.map((one) => node("li", {}, change(one))));
}

const change = (one) => (one.said ? fix(one) : node("p", { class: "note" }, ...priced(one)));

/** A change in words, what it costs, and its flags. */
function priced(one) {
  const speed = one.slower === null || one.slower === undefined ? "" : Math.abs(one.slower) < 0.005 ? ", as fast" : `, ${Math.abs(100 * one.slower).toFixed(0)} % ${one.slower > 0 ? "slower" : "faster"}${one.flags.includes("--gpus ") ? " per GPU" : ""}`;
  const now = state.told.stages.columns[state.told.estimate.job.recipe.zero_stage].needed_bytes;
  return [one.change, node("small", {}, `${short(now)} → ${short(one.needed_bytes)}${one.needs_expandable_segments ? ", only with expandable segments" : one.is_tight ? ", tightly" : ""}${speed}`), node("code", {}, one.flags)];
}

function fix(one) {
  const made = node("button", { type: "button" }, ...priced(one));
  made.addEventListener("click", () => loaded(one.said));
  return made;
}

// --- the bar ------------------------------------------------------------------------------------------------------------------

const CACHE = "the allocator's cache, which need not fit";

/** What a GPU holds, by kind, and the cache that the allocator keeps beside it. [bytes] */
function pieces(told) {
  const own = told.stages.columns[told.estimate.job.recipe.zero_stage];
  const cache = Math.max(0, own.comfortable_bytes - own.needed_bytes);
  return [...own.parts, ...(cache ? [{ what: CACHE, n_bytes: cache }] : [])];
}

function bar(told, before) {
  const now = pieces(told), was = new Map(before ? pieces(before).map((one) => [one.what, one.n_bytes]) : []);
  const capacity = told.stages.capacity_bytes || 0, total = now.reduce((sum, one) => sum + one.n_bytes, 0);
  const had = [...was].map(([what, bytes]) => [what, bytes - (now.find((one) => one.what === what)?.n_bytes || 0)]).filter(([, less]) => less >= GIB / 20);
  const freed = had.reduce((sum, [, less]) => sum + less, 0);
  const scale = Math.max(total + freed, capacity) * 1.03, percent = (bytes) => `${(100 * bytes) / scale}%`;
  const left = new Set(of("bar").querySelectorAll("div"));
  let at = 0;
  for (const one of now) {
    const made = piece(`piece-${one.what}`, "piece");
    left.delete(made);
    paint(made, one.what);
    put(made, percent(at), percent(one.n_bytes));
    const clear = capacity > at && capacity < at + one.n_bytes ? capacity - at : one.n_bytes; // words lie left of the capacity's line
    label(made, one, (of("bar").clientWidth * clear) / scale);
    made.title = `${one.what}: ${size(one.n_bytes)}`;
    at += one.n_bytes;
  }
  ghosts(had, at, percent, left);
  limit(capacity, percent, scale, left);
  ticks(scale, capacity, percent, left);
  for (const gone of left) gone.remove();
  const said = now.map((one) => `${one.what} ${short(one.n_bytes)}`).join(", ");
  of("bar").setAttribute("aria-label", `${said}${capacity ? `; the GPU has ${short(capacity)}` : ""}`);
  of("bar-legend").replaceChildren(...now.map((one) => node("li", {}, swatch(one.what), `${one.what} ${short(one.n_bytes)}`, ...delta(one, was, before))), ...gone(now, was));
}

/** A part of the bar by its name: the one that is there, which then moves, or a new one. */
function piece(id, kind) {
  const found = [...of("bar").children].find((one) => one.dataset.id === id);
  if (found) return found;
  const made = node("div", { class: kind, "data-id": id }, node("span"));
  of("bar").append(made);
  return made;
}

function put(made, left, width) {
  made.style.left = left;
  made.style.width = width;
}

/** Name and size, or the size, or neither, as there is room. [px] */
function label(made, one, room) {
  const fits = [`${one.what} ${short(one.n_bytes)}`, short(one.n_bytes), ""].find((text) => !text || text.length * 6.8 + 14 < room);
  made.firstChild.textContent = fits;
  made.classList.toggle("narrow", !fits);
}

/** What each kind had more of before this change, as dashed outlines in the room that has become free. */
function ghosts(had, at, percent, left) {
  for (const [what, less] of had) {
    const made = piece(`ghost-${what}`, "ghost");
    left.delete(made);
    put(made, percent(at), percent(less));
    made.firstChild.textContent = `−${short(less)} ${what}`;
    made.title = `${what}: ${size(less)} less than before`;
    at += less;
  }
}

function limit(capacity, percent, scale, left) {
  if (!capacity) return;
  const made = piece("limit", "limit-line");
  left.delete(made);
  made.style.left = percent(capacity);
  made.classList.toggle("left", capacity / scale < 0.3);
  made.firstChild.textContent = `the GPU has ${short(capacity)}`;
}

function ticks(scale, capacity, percent, left) {
  for (let at = 0, by = niceStep(scale / GIB, 6); at * GIB < scale * 0.97; at += by) {
    const made = piece(`tick-${at}`, at ? "scale" : "scale zero");
    left.delete(made);
    made.style.left = percent(at * GIB);
    made.firstChild.textContent = Math.abs(at * GIB - capacity) < scale / 60 ? "" : at ? String(Number(at.toPrecision(4))) : "0 GiB"; // else below the line
  }
}

function paint(made, what) {
  if (what === CACHE) { made.classList.add("cache"); return; }
  made.style.backgroundColor = state.colours[what];
  made.style.backgroundImage = HATCHES[state.hatches?.[what]] || "none";
}

function delta(one, was, before) {
  const more = one.n_bytes - (was.get(one.what) || 0);
  if (!before || Math.abs(more) < GIB / 20) return [];
  return [node("span", { class: `delta ${more < 0 ? "less" : "more"}` }, ` ${more < 0 ? "−" : "+"}${short(Math.abs(more))}`)];
}

function gone(now, was) {
  const here = new Set(now.map((one) => one.what));
  return [...was].filter(([what, bytes]) => !here.has(what) && bytes >= GIB / 20).map(([what, bytes]) => node("li", {}, `${what} 0`, node("span", { class: "delta less" }, ` −${short(bytes)}`)));
}

// --- what should be run -------------------------------------------------------------------------------------------------------

function clearPlan() {
  of("layouts").replaceChildren();
  for (const one of ["fell", "plan-command", "scatter", "spot"]) of(one).hidden = true;
}

function showPlan(told) {
  const { plan: found, layouts } = told, counted = `${found.considered.toLocaleString("en")} layouts considered`;
  of("plan-said").textContent = found.fits ? `${counted}; the best and what comes next:` : `${counted}; nothing fits. The closest:`;
  of("layouts").replaceChildren(...layouts.map((one, at) => layout(one, found.fits && at === 0 ? `Best for ${found.objective}: ` : "")));
  of("fallen").replaceChildren(...found.fallen.map((one) => node("li", {}, `${one.layouts.toLocaleString("en")}: ${one.rule}`)));
  of("fell").hidden = !found.fallen.length;
  scatter(told.scatter);
  of("plan-command").hidden = false;
  of("plan-command").querySelector("code").textContent = told.command;
}

function layout(one, best) {
  const load = node("button", { type: "button", "aria-label": `Load into the controls: ${one.layout}` }, "Load");
  load.addEventListener("click", () => loaded(one.said));
  const figures = `${size(one.least_bytes)} needed, ${perGpu(one)}, ${perStep(one)} per step`;
  const button = one.said ? [load] : []; // what has a flag without a control cannot be shown here
  return node("li", { class: best ? "best" : "" }, node("p", {}, node("strong", {}, best), one.layout), node("p", { class: "figures" }, figures), node("p", { class: "note" }, one.why), ...button);
}

/** Set the controls to a job, and go to its answer. */
function loaded(said) {
  location.hash = new URLSearchParams(said);
  of("answer").focus();
}

/** Every layout by memory and speed: a spot each, those that nothing beats in both as rings on a line. */
function scatter(series) {
  state.scattered = series;
  of("scatter").hidden = of("spot").hidden = !series.spots.length;
  if (!series.spots.length) return;
  const width = wideAs("scatter"), height = 280, left = 70, bottom = 40, head = 18;
  const most = Math.max(series.capacity_bytes, ...series.spots.map(([needed]) => needed)) * 1.04, quick = Math.max(...series.spots.map(([, rate]) => rate)) * 1.06;
  const x = (bytes) => left + (bytes / most) * (width - left - 10), y = (rate) => height - bottom - (rate / quick) * (height - bottom - head);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${series.spots.length} spots of layouts by memory and speed; ${series.front.length} are beaten by none in both` });
  for (let at = 0, by = niceStep(quick, 4); at < quick; at += by) {
    svg.append(drawn("line", { x1: left, x2: width - 10, y1: y(at), y2: y(at), class: "rule" }), drawn("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end", class: "faint" }, at.toLocaleString("en")));
  }
  for (let at = 0, by = niceStep(most / GIB, 6); at * GIB < most; at += by) svg.append(drawn("text", { x: x(at * GIB), y: height - bottom + 15, "text-anchor": "middle", class: "faint" }, String(Number(at.toPrecision(4)))));
  svg.append(drawn("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "faint" }, "GiB that one GPU needs"), drawn("text", { x: 2, y: 11, class: "faint" }, "tokens/s per GPU"));
  svg.append(drawn("line", { x1: x(series.capacity_bytes), x2: x(series.capacity_bytes), y1: head, y2: height - bottom, class: "limit" }));
  for (const [needed, rate, engine, fits, count] of series.spots) {
    const face = fits === "fits" ? { fill: state.engines[engine] } : { fill: "none", stroke: fits === "tight" ? state.engines[engine] : "#999" };
    svg.append(drawn("circle", { cx: x(needed).toFixed(1), cy: y(rate).toFixed(1), r: fits === "does not fit" ? 1.6 : 2.6, opacity: 0.75, ...face }, drawn("title", {}, `${engine}, ${fits}: ${short(needed)}, ${Math.round(rate).toLocaleString("en")} tokens/s per GPU${count > 1 ? `; ${count} layouts` : ""}`)));
  }
  if (series.front.length) svg.append(drawn("path", { d: `M ${series.front.map((one) => `${x(one.needed_bytes).toFixed(1)} ${y(one.tokens_per_s).toFixed(1)}`).join(" L ")}`, class: "front" }));
  svg.append(...series.front.map((one) => ring(one, x(one.needed_bytes), y(one.tokens_per_s))));
  const engines = [...new Set(series.spots.map(([, , engine]) => engine))];
  engines.forEach((engine, at) => svg.append(drawn("circle", { cx: left + 52 + 92 * at, cy: head - 8, r: 4, fill: state.engines[engine] }), drawn("text", { x: left + 60 + 92 * at, y: head - 4, class: "faint" }, engine)));
  of("scatter").replaceChildren(svg);
}

function ring(one, cx, cy) {
  const words = `${one.words}: ${short(one.needed_bytes)}, ${Math.round(one.tokens_per_s).toLocaleString("en")} tokens/s per GPU`;
  const made = drawn("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: 6, class: "ring", tabindex: 0, role: "button", "aria-label": words });
  const say = () => { of("spot").textContent = words; };
  for (const event of ["pointerenter", "focus"]) made.addEventListener(event, say);
  if (!one.said) return made; // what has a flag without a control cannot be shown here
  made.addEventListener("click", () => loaded(one.said));
  made.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); loaded(one.said); } });
  return made;
}

// --- the configuration --------------------------------------------------------------------------------------------------------

const TARGETS = { deepspeed: "DeepSpeed", accelerate: "Accelerate", fsdp2: "FSDP2 script", torchtitan: "torchtitan", megatron: "Megatron" };

function files(found) {
  of("files").replaceChildren(...found.map((one) => node("div", {}, node("h3", {}, TARGETS[one.target] || one.target), ...(one.refusal ? [node("p", { class: "note" }, `Not for this job: ${worded(one.refusal)}`)] : handedOut(one)))));
}

function handedOut(one) {
  const buttons = one.files.map((file) => {
    const button = node("button", { type: "button" }, `Download ${file.name}`);
    button.addEventListener("click", () => download(file));
    return button;
  });
  return [node("p", {}, ...buttons), node("p", {}, node("code", {}, one.launch)), node("ul", { class: "note" }, ...one.notes.map((note) => node("li", {}, worded(note))))];
}

function download(file) {
  const address = URL.createObjectURL(new Blob([file.text], { type: "text/plain" }));
  node("a", { href: address, download: file.name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** The colours of what a chart consists of. */
function legend(id, drawnKinds) {
  const kinds = Object.keys(state.colours).filter((kind) => drawnKinds.has(kind));
  of(id).replaceChildren(...kinds.map((kind) => node("li", {}, swatch(kind), kind)));
}

function swatch(kind) {
  if (kind === CACHE) return node("span", { class: "swatch cache" });
  return drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, ...filled("rect", { width: 10, height: 10 }, kind));
}

// The hatches of the pictures on paper, so that kinds differ without their colours too: as backgrounds, and as lines of a pattern.
const INK = "rgb(0 0 0 / .28)";
const lines = (angle) => `repeating-linear-gradient(${angle}, transparent 0 5px, ${INK} 5px 6.5px)`;
const HATCHES = {
  "//": lines("-45deg"), "\\\\": lines("45deg"), "--": lines("0deg"), "xx": `${lines("45deg")}, ${lines("-45deg")}`, "++": `${lines("0deg")}, ${lines("90deg")}`,
  "..": `radial-gradient(${INK} 1px, transparent 1.4px) 0 0 / 6px 6px`,
};
const STROKES = { "//": "M0 6 6 0", "\\\\": "M0 0 6 6", "--": "M0 3 6 3", "xx": "M0 6 6 0 M0 0 6 6", "++": "M0 3 6 3 M3 0 3 6", "..": "M2.2 3 3.8 3" };

function patterns() {
  const made = Object.entries(STROKES).map(([hatch, d], at) => drawn("pattern", { id: `hatch-${at}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, drawn("path", { d, stroke: INK, "stroke-width": hatch === ".." ? 1.6 : 1 })));
  document.body.append(drawn("svg", { class: "patterns", "aria-hidden": "true" }, drawn("defs", {}, ...made)));
}

/** A shape in a kind's colour, and over it the kind's hatch. */
function filled(name, attributes, kind, ...children) {
  const at = Object.keys(STROKES).indexOf(state.hatches?.[kind]);
  const shape = drawn(name, { class: "band", ...attributes, fill: state.colours[kind] }, ...children);
  return at < 0 ? [shape] : [shape, drawn(name, { ...attributes, fill: `url(#hatch-${at})`, "pointer-events": "none" })];
}

/** The drawing is as wide as its place, so that its words are as large on a phone as on a desk. */
const wideAs = (id) => Math.max(300, Math.min(1400, of(id).clientWidth || 720));

function niceStep(top, wanted) {
  const rough = top / wanted, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function axis(svg, top, y, left, right) {
  for (let at = 0, step = niceStep(top / GIB, 5); at <= top / GIB; at += step) {
    svg.append(drawn("line", { x1: left, x2: right, y1: y(at * GIB), y2: y(at * GIB), class: "rule" }));
    svg.append(drawn("text", { x: left - 6, y: y(at * GIB) + 4, "text-anchor": "end", class: "faint" }, String(Number(at.toPrecision(6)))));
  }
  svg.append(drawn("text", { x: left - 6, y: 12, "text-anchor": "end", class: "faint" }, "GiB"));
}

/** The line of what there is, and its words `off` it, or above the picture where something as high as the line, of the heights `taken`, would be below them. */
function capacityLine(svg, words, at, left, right, taken = [], off = -5) {
  svg.append(drawn("line", { x1: left, x2: right, y1: at, y2: at, class: "limit" }));
  if (taken.some((height) => height < at + 4)) { // something is as high as the line: the words go above the picture
    svg.append(drawn("line", { x1: right - 6.4 * words.length - 34, x2: right - 6.4 * words.length - 8, y1: 8, y2: 8, class: "limit" }));
    [at, off] = [12, 0];
  }
  svg.append(drawn("text", { x: right - 2, y: at + off, "text-anchor": "end", class: "limit-text" }, words));
}

function stages(series, speeds, own) {
  const width = wideAs("stages"), height = 340, left = 52, head = 30, room = (width - left - 8) / series.columns.length;
  const engines = series.columns.map((one) => words(one.engine, Math.max(8, Math.floor(room / 6))));
  const bottom = 50 + 12 * Math.max(...engines.map((lines) => lines.length));
  const tall = Math.max(...series.columns.map((one) => one.needed_bytes), series.capacity_bytes || 0) * 1.06 || 1;
  const y = (bytes) => height - bottom - (bytes / tall) * (height - bottom - head);
  const said = series.columns.map((one) => `stage ${one.stage}: ${one.refusal || size(one.needed_bytes)}`).join("; ");
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Needed by one GPU. ${said}` });
  axis(svg, tall, y, left, width - 8);
  const wide = room * 0.56;
  const line = series.capacity_bytes ? y(series.capacity_bytes) : -Infinity;
  series.columns.forEach((one, at) => column(svg, one, [...engines[at], rate(speeds[at], room)], { x: left + room * at + (room - wide) / 2, wide, room, line }, y, height - bottom, one.stage === own));
  if (series.capacity_bytes) capacityLine(svg, `the GPU has ${short(series.capacity_bytes)}`, y(series.capacity_bytes), left, width - 8, series.columns.map((one) => y(one.needed_bytes)));
  svg.append(...svg.querySelectorAll("text.total"));
  of("stages").replaceChildren(svg);
  legend("stages-legend", new Set(series.columns.flatMap((one) => one.parts.map((part) => part.what))));
}

/** Tokens per second and GPU, as a label below a column. */
const rate = (speed, room) => (speed.refusal ? "" : `${Math.round(speed.tokens_per_s_per_gpu).toLocaleString("en")}${room < 110 ? " tok/s" : " tokens/s per GPU"}`);

function column(svg, one, below, { x, wide, room, line }, y, floor, chosen) {
  let bottom = 0;
  for (const part of one.parts) {
    const [from, to] = [y(bottom), y(bottom + part.n_bytes)];
    svg.append(...filled("rect", { x, y: to, width: wide, height: Math.max(0, from - to) }, part.what, drawn("title", {}, `${part.what}: ${size(part.n_bytes)}`)));
    bottom += part.n_bytes;
  }
  if (chosen) svg.append(drawn("rect", { x: x - 3, y: y(bottom) - 2, width: wide + 6, height: floor - y(bottom) + 2, class: "peak" }));
  const middle = x + wide / 2;
  const total = one.refusal ? "not offered" : room < 80 ? gib(one.needed_bytes) : `${gib(one.needed_bytes)} GiB`;
  const crosses = y(bottom) - 20 < line && line < y(bottom); // the capacity's line would go through the words
  svg.append(drawn("text", { x: middle, y: (crosses ? line : y(bottom)) - 6, "text-anchor": "middle", class: "total" }, total));
  svg.append(drawn("text", { x: middle, y: floor + 17, "text-anchor": "middle" }, `stage ${one.stage}`));
  below.forEach((line, at) => svg.append(drawn("text", { x: middle, y: floor + 31 + 12 * at, "text-anchor": "middle", class: "faint" }, line)));
  const stage = of(`c-stage-${one.stage}`);
  if (stage && !chosen && !one.refusal) svg.append(choose(stage, one, { x: x - (room - wide) / 2, y: 0, width: room, height: floor + 20 }));
}

/** Where a click chooses a stage; by keyboard the controls do. */
function choose(stage, one, box) {
  const made = drawn("rect", { ...box, class: "choose" }, drawn("title", {}, `stage ${one.stage}: ${size(one.needed_bytes)}`));
  made.addEventListener("click", () => stage.click());
  return made;
}

function words(text, most) {
  const lines = [""];
  for (const word of text.split(/(?<=[ _=+])|(?<=[a-z])(?=[A-Z])/)) {
    if ((lines.at(-1) + word).length > most && lines.at(-1)) lines.push("");
    lines[lines.length - 1] += word;
  }
  return lines.map((line) => line.trim());
}

// --- more GPUs ----------------------------------------------------------------------------------------------------------------

const DASHES = { 0: "", 1: "6 3", 2: "2 3", 3: "8 3 2 3" };

/** What a GPU needs against the number of GPUs, a line for each stage, both in doublings. */
function scaling(series) {
  state.scaled = series;
  const found = series.lines.filter((one) => one.points.length), every = found.flatMap((one) => one.points);
  of("scaling-part").hidden = every.length < 2;
  if (every.length < 2) return;
  const width = wideAs("scaling"), height = 300, left = 52, right = 66, bottom = 40, head = 22;
  const sizes = [...every.map((one) => one.needed_bytes), ...(series.capacity_bytes ? [series.capacity_bytes] : [])];
  const [low, high] = [Math.log2(Math.min(...sizes)) - 0.3, Math.log2(Math.max(...sizes)) + 0.3], [few, many] = [Math.log2(Math.min(...every.map((one) => one.gpus))), Math.log2(Math.max(...every.map((one) => one.gpus)))];
  const x = (gpus) => left + ((Math.log2(gpus) - few) / (many - few || 1)) * (width - left - right), y = (bytes) => height - bottom - ((Math.log2(bytes) - low) / (high - low)) * (height - bottom - head);
  const fits = series.lines.map((one) => `stage ${one.stage}: ${one.refusal && !one.points.length ? "not offered" : one.fits}`);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Needed by one GPU against the number of GPUs. ${series.capacity_bytes ? fits.join("; ") : ""}` });
  doublings(svg, { low, high, few, many, width: width - right, left, floor: height - bottom }, x, y);
  if (series.capacity_bytes) {
    const line = y(series.capacity_bytes), above = every.some((one) => x(one.gpus) > width - right - 150 && line - 22 < y(one.needed_bytes) && y(one.needed_bytes) < line);
    capacityLine(svg, `the GPU has ${short(series.capacity_bytes)}`, line, left, width - right, [], above ? 15 : -5);
  }
  const ends = apart(found.map((one) => y(one.points.at(-1).needed_bytes)));
  found.forEach((one, at) => stageLine(svg, one, ends[at], x, y, width - right));
  svg.append(drawn("circle", { cx: x(series.own.gpus).toFixed(1), cy: y(series.own.needed_bytes).toFixed(1), r: 7, class: "own" }, drawn("title", {}, `this job: ${size(series.own.needed_bytes)} on ${gpus(series.own.gpus)}`)));
  of("scaling").replaceChildren(svg);
  of("scaling-legend").replaceChildren(...series.lines.map((one, at) => node("li", {}, drawn("svg", { viewBox: "0 0 22 10", class: "dash", "aria-hidden": "true" }, drawn("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: state.stageColours[one.stage], "stroke-width": 3, "stroke-dasharray": DASHES[one.stage] })), series.capacity_bytes ? fits[at] : `stage ${one.stage}`)));
}

/** Lines and figures at powers of two. */
function doublings(svg, { low, high, few, many, width, left, floor }, x, y) {
  const by = Math.ceil((high - low) / 6) || 1, every = Math.ceil(((many - few) * 42) / (width - left)) || 1; // a figure is up to 42 px wide
  for (let power = Math.ceil((low - 30) / by) * by; power + 30 <= high; power += by) svg.append(drawn("line", { x1: left, x2: width, y1: y(2 ** (power + 30)), y2: y(2 ** (power + 30)), class: "rule" }), drawn("text", { x: left - 6, y: y(2 ** (power + 30)) + 4, "text-anchor": "end", class: "faint" }, (2 ** power).toLocaleString("en", { maximumSignificantDigits: 3 })));
  for (let power = few; power <= many + 0.01; power += every) svg.append(drawn("text", { x: x(2 ** power), y: floor + 16, "text-anchor": "middle", class: "faint" }, Math.round(2 ** power).toLocaleString("en")));
  svg.append(drawn("text", { x: (left + width) / 2, y: floor + 34, "text-anchor": "middle", class: "faint" }, "GPUs"), drawn("text", { x: left - 6, y: 12, "text-anchor": "end", class: "faint" }, "GiB"));
}

/** One stage: its line, its name where it ends, and a point for each number of GPUs. */
function stageLine(svg, one, end, x, y, right) {
  const colour = state.stageColours[one.stage], at = (point) => `${x(point.gpus).toFixed(1)} ${y(point.needed_bytes).toFixed(1)}`;
  svg.append(drawn("path", { d: `M ${one.points.map(at).join(" L ")}`, fill: "none", stroke: colour, "stroke-width": 2.5, "stroke-dasharray": DASHES[one.stage] }), drawn("text", { x: right + 8, y: end + 4 }, `stage ${one.stage}`));
  for (const point of one.points) {
    const fits = ["fits", "tight"].includes(point.verdict);
    const spot = drawn("circle", { cx: x(point.gpus).toFixed(1), cy: y(point.needed_bytes).toFixed(1), r: 4.5, fill: fits ? colour : "var(--paper)", stroke: colour, class: "spot" }, drawn("title", {}, `stage ${one.stage} on ${gpus(point.gpus)}: ${size(point.needed_bytes)}${point.verdict === "unknown" ? "" : `, ${point.verdict}`}`));
    spot.addEventListener("click", () => { const there = said(); there.set("stage", one.stage); there.set("gpus", point.gpus); loaded(there); });
    svg.append(spot);
  }
}

const gpus = (count) => `${count.toLocaleString("en")} GPU${count === 1 ? "" : "s"}`;

/** Heights of labels that do not lie upon each other. [px] */
function apart(heights) {
  const order = heights.map((_, at) => at).sort((one, other) => heights[one] - heights[other]), moved = [...heights];
  order.forEach((at, place) => { if (place) moved[at] = Math.max(moved[at], moved[order[place - 1]] + 14); });
  return moved;
}

// --- the step -----------------------------------------------------------------------------------------------------------------

function showStep(series) {
  state.step = series;
  state.at = series.peak;
  Object.assign(of("scrub"), { max: series.totals.length - 1, value: series.peak });
  drawStep();
}

/** The bytes of a line in each column, from where they change. */
function spread(line, count) {
  const row = new Float64Array(count);
  line.columns.forEach((from, at) => row.fill(line.n_bytes[at], from, line.columns[at + 1] ?? count));
  return row;
}

const LANE = 15;

function drawStep() {
  const series = state.step, count = series.totals.length, lanes = [...new Set(series.calls.map((one) => one.operation))];
  const width = wideAs("timeline"), left = lanes.length ? 96 : 52, bottom = 34 + LANE * lanes.length, head = 26, height = 270 + LANE * lanes.length;
  const tall = Math.max(series.totals[series.peak], series.room_bytes || 0) * 1.06 || 1;
  const y = (bytes) => height - bottom - (bytes / tall) * (height - bottom - head), x = (at) => left + ((width - left - 8) * at) / count;
  const peak = placeOf(series, series.peak);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Memory over one step; highest in the ${peak.phase}${peak.name && `, ${peak.name}`}: ${size(series.totals[series.peak])}` });
  axis(svg, tall, y, left, width - 8);
  const kinds = layers(svg, series, x, y);
  if (series.room_bytes) {
    const room = short(series.room_bytes), words = width < 480 ? `${room} for the allocator` : `the GPU leaves ${room} to the allocator`;
    capacityLine(svg, words, y(series.room_bytes), left, width - 8, series.totals.map(y));
  }
  svg.append(drawn("path", { d: `M ${x(series.peak + 0.5)} ${y(series.totals[series.peak]) - 4} l -5 -9 h 10 z`, class: "mark" }));
  lanes.forEach((operation, at) => lane(svg, series.calls.filter((one) => one.operation === operation), operation, x, height - bottom + 6 + LANE * at, left));
  phases(series, x, svg, height - 8);
  state.scrubber = drawn("line", { class: "scrubber", y1: head - 8, y2: height - 22 });
  svg.append(state.scrubber);
  of("timeline").replaceChildren(svg);
  of("timeline").setAttribute("aria-busy", "false");
  state.columnAt = (px) => Math.max(0, Math.min(count - 1, Math.floor((((px / of("timeline").clientWidth) * width - left) / (width - left - 8)) * count)));
  state.columnX = x;
  legend("timeline-legend", kinds);
  const how = series.requests ? "From left to right: every request and release of memory in order, not time." : "One column for each named moment.";
  of("timeline-note").textContent = `${how}${series.calls.length ? " Below: where each collective begins." : ""}${series.caption.lines.slice(2).map((line) => ` ${line[0].toUpperCase()}${line.slice(1)}.`).join("")}`;
  scrubbed(state.at);
}

/** The kinds on top of each other, each one path; which they are. */
function layers(svg, series, x, y) {
  const count = series.totals.length, rows = new Map();
  for (const line of series.lines) {
    const row = spread(line, count), sum = rows.get(line.kind);
    if (sum) row.forEach((bytes, at) => { sum[at] += bytes; });
    else rows.set(line.kind, row);
  }
  let below = new Float64Array(count);
  const kinds = Object.keys(state.colours).filter((kind) => rows.has(kind));
  for (const kind of kinds) {
    const above = below.map((bytes, at) => bytes + rows.get(kind)[at]);
    svg.append(...filled("path", { d: between(below, above, x, y), class: "layer" }, kind));
    below = above;
  }
  return new Set(kinds);
}

/** The area between two rows of steps. */
function between(below, above, x, y) {
  const forth = [], back = [], near = (px) => px.toFixed(1);
  for (let at = 0; at < above.length; at++) {
    forth.push(`${near(x(at))} ${near(y(above[at]))} ${near(x(at + 1))} ${near(y(above[at]))}`);
    back.push(`${near(x(at + 1))} ${near(y(below[at]))} ${near(x(at))} ${near(y(below[at]))}`);
  }
  return `M ${forth.join(" ")} ${back.reverse().join(" ")} z`;
}

function lane(svg, calls, operation, x, top, left) {
  svg.append(drawn("text", { x: left - 6, y: top + 9, "text-anchor": "end", class: "faint" }, operation.replaceAll("_", "-")));
  for (const one of calls) {
    const many = one.calls > 1 ? `${one.calls} x ` : "";
    svg.append(drawn("rect", { x: x(one.column).toFixed(1), y: top, width: Math.max(1.5, x(one.column + 1) - x(one.column) - 0.5).toFixed(1), height: LANE - 5, class: "call" }, drawn("title", {}, `${many}${operation}: ${size(one.n_bytes)}`)));
  }
}

/** Where a column is: the phase and the block. */
const placeOf = (series, column) => series.places.findLast((one) => one.column <= column) || series.places[0];

function phases(series, x, svg, floor) {
  const changes = series.places.filter((one, at) => !at || series.places[at - 1].phase !== one.phase);
  changes.forEach((one, at) => {
    const [from, to] = [x(one.column), x(changes[at + 1]?.column ?? series.totals.length)];
    if (at) svg.append(drawn("line", { x1: from, x2: from, y1: 18, y2: floor, class: "rule" }));
    const long = one.phase.length * 6, last = at + 1 === changes.length;
    if (long < to - from) svg.append(drawn("text", { x: (from + to) / 2, y: floor, "text-anchor": "middle", class: "faint" }, one.phase));
    else if (last && long < (to - x(changes[at - 1]?.column ?? 0)) / 3) svg.append(drawn("text", { x: to, y: floor, "text-anchor": "end", class: "faint" }, one.phase));
  });
}

/** Move the scrubber to a column: the line in the picture, its words, and the ledger of that moment. */
function scrubbed(at) {
  const series = state.step, place = placeOf(series, at), total = series.totals[at];
  state.at = at;
  of("scrub").value = at;
  for (const end of ["x1", "x2"]) state.scrubber.setAttribute(end, state.columnX(at + 0.5));
  const words = `${place.phase[0].toUpperCase()}${place.phase.slice(1)}${place.name && `, ${place.name}`}: ${size(total)}`;
  of("moment").textContent = at === series.peak ? `${words}, the peak` : words;
  of("scrub").setAttribute("aria-valuetext", words);
  if (at === series.peak && !opened()) ledger(state.told.estimate);
  else ledgerAt(at, words);
}

for (const event of ["pointerdown", "pointermove"]) {
  of("timeline").addEventListener(event, (moved) => {
    if (!state.step || (event === "pointermove" && moved.pointerType !== "mouse" && !moved.buttons)) return;
    if (event === "pointermove" && moved.pointerType === "mouse" && !moved.buttons) return;
    scrubbed(state.columnAt(moved.clientX - of("timeline").getBoundingClientRect().left));
  });
}
of("scrub").addEventListener("input", () => { if (state.step) scrubbed(Number(of("scrub").value)); });
of("to-peak").addEventListener("click", () => { if (state.step) scrubbed(state.step.peak); });

// --- a file of the reader's own ------------------------------------------------------------------------------------------------

const opened = () => main.classList.contains("opened");

/** Show what is alive over time in a file, in place of the job. */
async function openFile(file) {
  if (!file) return;
  clearTimeout(state.calm);
  const config = await configOf(file);
  const message = config ? "" : await messageOf(file);
  if (message) { of("file").value = ""; of("message").value = message; of("ran-out").scrollIntoView(); explain(); return; }
  if (config) { const there = said(); there.delete("model"); there.set("config", config); of("file").value = ""; loaded(there); return; }
  const mine = ++state.asked, headed = of("headline").textContent;
  of("headline").textContent = `Reading ${file.name}…`;
  const told = await fetched(`/api/opened?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
  if (mine !== state.asked) return;
  if (told.error) { of("error").textContent = told.error; of("error").hidden = false; of("headline").textContent = headed; return; }
  of("error").hidden = true;
  main.classList.remove("stale", "empty", "waiting");
  main.classList.add("opened");
  of("close").hidden = false;
  of("timeline-title").textContent = "Request by request";
  of("headline").textContent = "A file of your own";
  judge([`${told.headline}.`, ...told.advice].join(" "), null);
  showStep(told.step);
}

const LONGEST_CONFIG = 2 ** 16, NAMES_ALONE = ["id2label", "label2id", "auto_map", "task_specific_params"];

/** The content of a config.json, without lists of names, for the address; empty for any other file. */
async function configOf(file) {
  if (file.size > LONGEST_CONFIG) return "";
  const text = await file.text(), named = file.name === "config.json"; // by its name it is one: the server says what is wrong with it
  try {
    const found = JSON.parse(text);
    return named || found?.model_type ? JSON.stringify(found, (key, value) => (NAMES_ALONE.includes(key) ? undefined : value)) : "";
  } catch {
    return named ? text : "";
  }
}

const LOG_END = 2 ** 22;

/** Torch's message at the end of a log; empty for a snapshot, a trace or a run. */
async function messageOf(file) {
  if (/\.(pickle|pkl|gz|json)$/.test(file.name)) return "";
  return messageIn(await file.slice(-LOG_END).text());
}

function closeFile() {
  main.classList.remove("opened");
  of("close").hidden = true;
  of("timeline-title").textContent = "Over one step";
  of("file").value = "";
}

of("close").addEventListener("click", () => { closeFile(); ask(); });
of("file").addEventListener("change", () => openFile(of("file").files[0]));
if (!of("told")) {
  for (const event of ["dragover", "drop", "dragleave"]) {
    addEventListener(event, (dragged) => {
      if (event === "dragleave" ? dragged.relatedTarget : !dragged.dataTransfer.types.includes("Files")) return;
      dragged.preventDefault();
      document.body.classList.toggle("dropping", event === "dragover");
      if (event === "drop") openFile(dragged.dataTransfer.files[0]);
    });
  }
}

// --- the ledger ---------------------------------------------------------------------------------------------------------------

const SMALL = GIB / 10;

function ledger(estimate) {
  of("ledger-title").textContent = "What is alive at the peak";
  tabled(estimate.peak.lines, estimate.peak.allocated_bytes);
}

/** The same at another moment of the step, where only purposes are known. */
function ledgerAt(at, words) {
  of("ledger-title").textContent = `What is alive: ${words.split(":")[0].toLowerCase()}`;
  const alive = state.step.lines.map((one) => ({ kind: one.kind, reason: one.reason, formula: "", bytes: one.n_bytes[one.columns.findLastIndex((from) => from <= at)] || 0 }));
  tabled(alive.filter((one) => one.bytes), state.step.totals[at]);
}

/** The lines by size, those under a tenth of a GiB folded away. */
function tabled(lines, total) {
  const rows = [...lines].sort((one, other) => other.bytes - one.bytes), few = rows.filter((one) => one.bytes < SMALL);
  const kept = few.length < 3 || few.length === rows.length ? rows : rows.filter((one) => one.bytes >= SMALL);
  const rest = rows.slice(kept.length), formulas = rows.some((one) => one.formula), shown = (line) => lineRow(line, formulas);
  const folded = node("tbody", { id: "folded" }, ...rest.map(shown));
  folded.hidden = !state.unfolded;
  const sum = node("tr", {}, node("th", { scope: "row" }, "together"), number(gib(total)), number(gb(total)), node("td", {}), ...(formulas ? [node("td", {})] : []));
  of("ledger").replaceChildren(heading(["kind", "GiB", "GB", "why", ...(formulas ? ["formula"] : [])], [1, 2]), node("tbody", {}, ...kept.map(shown)), folded, node("tbody", {}, sum));
  const together = rest.reduce((sum, one) => sum + one.bytes, 0);
  of("ledger-rest").hidden = !rest.length;
  of("ledger-rest").textContent = state.unfolded ? "Hide the small lines" : `Show ${rest.length} lines under 0.1 GiB, ${short(together)} together`;
  state.refold = () => tabled(lines, total);
}

const lineRow = (line, formulas) => node("tr", {}, node("td", {}, swatch(line.kind), line.kind), number(gib(line.bytes)), number(gb(line.bytes)), node("td", {}, line.reason), ...(formulas ? [node("td", {}, line.formula)] : []));

of("ledger-rest").addEventListener("click", () => { state.unfolded = !state.unfolded; state.refold(); });

function sent(communication, mesh) {
  const split = mesh.tp * mesh.cp * mesh.pp > 1; // such ranks also send activations, which DDP does not
  const beside = split ? "" : `: ${communication.relative_bytes_to_ddp.toFixed(2)}x the bytes of DDP, ${communication.relative_to_ddp.toFixed(2)}x its elements`;
  of("sent-sum").textContent = communication.total_bytes ? `${size(communication.total_bytes)}${beside}` : "Nothing is sent: there is one rank.";
  const body = communication.collectives.map((one) => node("tr", {}, node("td", {}, one.operation), number(one.calls.toLocaleString("en")), number(gib(one.sent_bytes)), number(gb(one.sent_bytes)), node("td", {}, `${one.what}, ${one.when}`)));
  of("sent").replaceChildren(...(body.length ? [heading(["collective", "calls", "GiB", "GB", "of what, when"], [1, 2, 3]), node("tbody", {}, ...body)] : []));
}

const number = (text) => node("td", { class: "number" }, text);

function heading(names, numbers) {
  return node("thead", {}, node("tr", {}, ...names.map((name, at) => node("th", { scope: "col", class: numbers.includes(at) ? "number" : "" }, name))));
}

// --- the beginning ------------------------------------------------------------------------------------------------------------

of("copy").addEventListener("click", async () => {
  const text = of("command").textContent;
  try {
    await navigator.clipboard.writeText(text);
    of("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(of("command")); // where the clipboard is not to be had, it is marked for the keyboard
    of("copy").textContent = "Marked";
  }
  setTimeout(() => { of("copy").textContent = "Copy"; }, 1500);
});

addEventListener("scroll", () => { if (state.later) moreGpus(...state.later); }, { passive: true });

/** Draw the pictures anew where their place has become another. */
function redraw() {
  if (!state.told) return;
  stages(state.told.stages, state.told.speeds, state.told.estimate.job.recipe.zero_stage);
  if (state.step) drawStep();
  if (state.scaled && !of("scaling-part").hidden) scaling(state.scaled);
  if (state.scattered && !of("scatter").hidden) scatter(state.scattered);
}
addEventListener("resize", () => { clearTimeout(state.resized); state.resized = setTimeout(redraw, WAIT_MS); });

/** A report: one job under every stage, which stands in the page. Its one control is the stage. */
function report({ colours, hatches, made, own, answers }) {
  of("made").textContent = made;
  Object.assign(state, { colours, hatches });
  const shown = (stage) => {
    show(answers[stage].answer);
    showStep(answers[stage].step);
    judge(answers[stage].verdict, answers[stage].fits);
    showChanges(answers[stage].changes);
  };
  of("controls").append(fieldOf({ name: "stage", label: "ZeRO stage", choices: Object.keys(answers) }));
  of(`c-stage-${own}`).checked = true;
  of("controls").addEventListener("input", (event) => shown(event.target.value));
  shown(own);
}

async function begin() {
  patterns();
  const told = of("told");
  if (told) { report(JSON.parse(told.textContent)); return; }
  const found = await fetched("/api/controls");
  if (found.error) { refuse(found.error); return; }
  build(found);
  await ask(addressed());
}

/** How high the head of the page is, below which the controls stay and to which a jump leads. */
const measured = () => document.documentElement.style.setProperty("--head", `${document.querySelector("header").offsetHeight}px`);
new ResizeObserver(measured).observe(document.querySelector("header"));

begin();
