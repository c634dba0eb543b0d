"use strict";
// Draws what the server answers. Every number on the page is one of the answer's; nothing is computed here but where to put it.

const GB = 1e9, GIB = 2 ** 30, WAIT_MS = 60;
const SVG = "http://www.w3.org/2000/svg";
const of = (id) => document.getElementById(id);
const state = { colours: {}, controls: [], asked: 0, timer: 0, settled: true, pushing: false };
const GONE = "The zeroplan server does not answer. Start `zeroplan explore` again.";
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
  return `${(bytes / unit).toFixed(2)} ${name} = ${(bytes / binary).toFixed(2)} ${other}`;
}
const gb = (bytes) => (bytes / GB).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const gib = (bytes) => (bytes / GIB).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

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
  if (control.hint) {
    field.append(node("p", { class: "hint", id: `${id}-hint` }, control.hint));
    field.querySelector(`#${id}`).setAttribute("aria-describedby", `${id}-hint`);
  }
  return field;
}

function stagesField(control, id) {
  const name = node("p", { class: "name", id: `${id}-name` }, control.label); // no label: a click on it would choose a stage
  const group = node("div", { class: "stages", role: "radiogroup", "aria-labelledby": `${id}-name` });
  for (const choice of control.choices) {
    const input = node("input", { type: "radio", name: control.name, value: choice, id: `${id}-${choice}` });
    group.append(node("span", {}, input, node("label", { for: `${id}-${choice}` }, choice)));
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
  slide.addEventListener("input", () => { count.value = control.least * 2 ** slide.value; count.dispatchEvent(new Event("input", { bubbles: true })); });
  count.addEventListener("input", () => { place(control, count, slide); });
  return [slide, count];
}

function place(control, count, slide) {
  const value = Number(count.value);
  if (value >= control.least) slide.value = Math.round(Math.log2(value / control.least));
  slide.setAttribute("aria-valuetext", count.value);
}

function build(told) {
  Object.assign(state, { colours: told.colours, controls: told.controls, describe: told.describe });
  const groups = new Map();
  for (const control of told.controls) {
    if (!groups.has(control.group)) groups.set(control.group, node("fieldset", {}, node("legend", {}, control.group)));
    groups.get(control.group).append(fieldOf(control));
  }
  of("controls").append(...groups.values());
  restore();
  of("controls").addEventListener("input", moved);
  of("controls").addEventListener("change", () => { state.settled = true; });
  of("controls").addEventListener("submit", (event) => event.preventDefault());
  of("asked").addEventListener("submit", (event) => { event.preventDefault(); plan(); });
  of("skip").addEventListener("click", (event) => { event.preventDefault(); of("answer").focus(); });
  addEventListener("hashchange", () => { if (!namesAPlace()) { restore(); ask(addressed()); } });
}

/** Ask soon. The first move after a control was left begins a new entry of the browser's history, for Back to return from. */
function moved() {
  busy(true);
  state.asked++; // an answer that is still on its way is to what stood there before
  if (state.settled) Object.assign(state, { settled: false, pushing: true });
  clearTimeout(state.timer);
  state.timer = setTimeout(ask, WAIT_MS);
}

/** Whether the address names a part of the page, as `#answer` does, and no job. */
const namesAPlace = () => location.hash.length > 1 && !location.hash.includes("=");
const inAddress = () => new URLSearchParams(namesAPlace() ? "" : location.hash.slice(1));

/** Set the controls to the job of the address. */
function restore() {
  const said = inAddress();
  for (const control of state.controls) {
    const value = said.has(control.name) ? said.get(control.name) : said.size && control.default && control.choices.includes("") ? "" : control.default;
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

function said() {
  const values = new URLSearchParams();
  for (const control of state.controls) {
    const value = of("controls").elements[control.name].value.trim();
    if (value) values.set(control.name, value);
  }
  return values;
}

// --- asking -------------------------------------------------------------------------------------------------------------------

const busy = (asking) => of("answer").setAttribute("aria-busy", String(asking));

/** The server's answer, or `error`: one line that says why there is none. */
async function fetched(path) {
  let response;
  try {
    response = await fetch(path);
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
  const mine = ++state.asked;
  remember(query);
  of("layouts").classList.toggle("stale", state.planned !== undefined && state.planned !== described(query));
  const told = await fetched(`/api/answer?${query}`);
  if (mine !== state.asked) return;
  if (told.error) refuse(told.error);
  else { show(told); if (told.estimate.fits === false) changes(query, mine); }
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
  if (mine === state.asked && !told.error) showChanges(told.changes);
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

/** Say why there is no answer, and that what still stands here is the last one. */
function refuse(why) {
  of("error").textContent = worded(why);
  of("error").hidden = false;
  of("answer").classList.add("stale");
  of("headline").textContent = state.told ? `Last answer: ${state.told.headline}` : "";
  judge("short", "no answer", false);
  judge("verdict", "These figures are from before the error.", null);
  showChanges([]);
  busy(false);
}

// --- showing ------------------------------------------------------------------------------------------------------------------

function show(told) {
  state.told = told;
  of("error").hidden = true;
  of("answer").classList.remove("stale", "empty");
  of("headline").textContent = told.headline;
  figures(told.estimate, told.speed);
  judge("short", `${gb(told.estimate.peak.allocated_bytes)} GB${told.estimate.fits === null ? "" : `, ${told.estimate.verdict}`}`, told.estimate.fits);
  judge("verdict", told.verdict, told.estimate.fits);
  showChanges([]);
  stages(told.stages, told.estimate.job.recipe.zero_stage);
  timeline(told.timeline);
  ledger(told.estimate);
  sent(told.estimate.communication);
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

/** Say something in the colour of a verdict: it fits, it does not, or nobody knows. */
function judge(id, words, fits) {
  of(id).textContent = words;
  of(id).className = fits === true ? "fits" : fits === false ? "not" : "";
}

function showChanges(found) {
  of("changes").hidden = !found.length;
  of("changes").replaceChildren(...found.map((one) => node("li", {}, node("code", {}, one.flags), ` ${one.change}: ${size(one.needed_bytes)}`)));
}

// --- what should be run -------------------------------------------------------------------------------------------------------

function clearPlan() {
  of("layouts").replaceChildren();
  of("fell").hidden = of("plan-command").hidden = true;
}

function showPlan(told) {
  const { plan: found, layouts } = told, counted = `${found.considered.toLocaleString("en")} layouts considered`;
  of("plan-said").textContent = found.fits ? `${counted}; the best and what comes next:` : `${counted}; nothing fits. The closest:`;
  of("layouts").replaceChildren(...layouts.map((one, at) => layout(one, found.fits && at === 0 ? `Best for ${found.objective}: ` : "")));
  of("fallen").replaceChildren(...found.fallen.map((one) => node("li", {}, `${one.layouts.toLocaleString("en")}: ${one.rule}`)));
  of("fell").hidden = !found.fallen.length;
  of("plan-command").hidden = false;
  of("plan-command").querySelector("code").textContent = told.command;
}

function layout(one, best) {
  const load = node("button", { type: "button", "aria-label": `Load into the controls: ${one.layout}` }, "Load");
  load.addEventListener("click", () => { location.hash = new URLSearchParams(one.said); of("answer").focus(); });
  const figures = `${size(one.least_bytes)} needed, ${perGpu(one)}, ${perStep(one)} per step`;
  const loaded = one.said ? [load] : []; // what has a flag without a control cannot be shown here
  return node("li", { class: best ? "best" : "" }, node("p", {}, node("strong", {}, best), one.layout), node("p", { class: "figures" }, figures), node("p", { class: "note" }, one.why), ...loaded);
}

// --- the configuration --------------------------------------------------------------------------------------------------------

const TARGETS = { deepspeed: "DeepSpeed", accelerate: "Accelerate", fsdp2: "FSDP2 script", torchtitan: "torchtitan", megatron: "Megatron" };

function files(found) {
  of("files").replaceChildren(...found.map((one) => node("div", {}, node("h3", {}, TARGETS[one.target] || one.target), ...(one.refusal ? [node("p", { class: "note" }, worded(one.refusal))] : handedOut(one)))));
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

/** The colours of what a chart's stacks consist of. */
function legend(id, stacks) {
  const drawnKinds = new Set(stacks.flatMap((one) => one.parts.map((part) => part.what)));
  const kinds = Object.keys(state.colours).filter((kind) => drawnKinds.has(kind));
  of(id).replaceChildren(...kinds.map((kind) => node("li", {}, swatch(kind), kind)));
}

function swatch(kind) {
  return drawn("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, drawn("rect", { width: 10, height: 10, fill: state.colours[kind] }));
}

/** The drawing is as wide as its place, so that its words are as large on a phone as on a desk. */
const wideAs = (id) => Math.max(300, Math.min(1100, of(id).clientWidth || 720));

function niceStep(top, wanted) {
  const rough = top / wanted, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function axis(svg, top, y, left, right) {
  for (let at = 0, step = niceStep(top / GB, 5); at <= top / GB; at += step) {
    svg.append(drawn("line", { x1: left, x2: right, y1: y(at * GB), y2: y(at * GB), class: "rule" }));
    svg.append(drawn("text", { x: left - 6, y: y(at * GB) + 4, "text-anchor": "end", class: "faint" }, String(Number(at.toPrecision(6)))));
  }
  svg.append(drawn("text", { x: left - 6, y: 12, "text-anchor": "end", class: "faint" }, "GB"));
}

function stages(series, own) {
  const width = wideAs("stages"), height = 330, left = 52, head = 26, room = (width - left - 8) / series.columns.length;
  const engines = series.columns.map((one) => words(one.engine, Math.max(8, Math.floor(room / 6))));
  const bottom = 34 + 12 * Math.max(...engines.map((lines) => lines.length));
  const tall = Math.max(...series.columns.map((one) => one.needed_bytes), series.capacity_bytes || 0) * 1.06 || 1;
  const y = (bytes) => height - bottom - (bytes / tall) * (height - bottom - head);
  const said = series.columns.map((one) => `stage ${one.stage}: ${one.refusal || size(one.needed_bytes)}`).join("; ");
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Needed by one GPU. ${said}` });
  axis(svg, tall, y, left, width - 8);
  const wide = room * 0.56;
  series.columns.forEach((one, at) => column(svg, one, engines[at], { x: left + room * at + (room - wide) / 2, wide, room }, y, height - bottom, one.stage === own));
  if (series.capacity_bytes) {
    const line = y(series.capacity_bytes);
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: line, y2: line, class: "limit" }));
    svg.append(drawn("text", { x: width - 10, y: line - 5, "text-anchor": "end", class: "limit-text" }, `the GPU has ${gb(series.capacity_bytes)} GB`));
  }
  of("stages").replaceChildren(svg);
  legend("stages-legend", series.columns);
}

function column(svg, one, engine, { x, wide, room }, y, floor, chosen) {
  let below = 0;
  for (const part of one.parts) {
    const [from, to] = [y(below), y(below + part.n_bytes)];
    const title = drawn("title", {}, `${part.what}: ${size(part.n_bytes)}`);
    svg.append(drawn("rect", { x, y: to, width: wide, height: Math.max(0, from - to), fill: state.colours[part.what], class: "band" }, title));
    below += part.n_bytes;
  }
  if (chosen) svg.append(drawn("rect", { x: x - 3, y: y(below) - 2, width: wide + 6, height: floor - y(below) + 2, class: "peak" }));
  const middle = x + wide / 2;
  const total = one.refusal ? "not offered" : room < 80 ? gb(one.needed_bytes) : `${gb(one.needed_bytes)} GB`;
  svg.append(drawn("text", { x: middle, y: y(below) - 6, "text-anchor": "middle" }, total));
  svg.append(drawn("text", { x: middle, y: floor + 17, "text-anchor": "middle" }, `stage ${one.stage}`));
  engine.forEach((line, at) => svg.append(drawn("text", { x: middle, y: floor + 31 + 12 * at, "text-anchor": "middle", class: "faint" }, line)));
}

function words(text, most) {
  const lines = [""];
  for (const word of text.split(/(?<=[ _=+])|(?<=[a-z])(?=[A-Z])/)) {
    if ((lines.at(-1) + word).length > most && lines.at(-1)) lines.push("");
    lines[lines.length - 1] += word;
  }
  return lines.map((line) => line.trim());
}

function timeline(series) {
  const width = wideAs("timeline"), height = 300, left = 52, bottom = 44, head = 26, count = series.instants.length;
  const tall = Math.max(...series.instants.map((one) => one.total_bytes), series.room_bytes || 0) * 1.06 || 1;
  const y = (bytes) => height - bottom - (bytes / tall) * (height - bottom - head);
  const room = (width - left - 8) / count;
  const peak = series.instants[series.peak];
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Memory over one step in ${count} moments; highest: ${peak.name}, ${size(peak.total_bytes)}` });
  axis(svg, tall, y, left, width - 8);
  series.instants.forEach((one, at) => instant(svg, one, left + room * at, room, y));
  if (series.room_bytes) svg.append(drawn("line", { x1: left, x2: width - 8, y1: y(series.room_bytes), y2: y(series.room_bytes), class: "limit" }));
  const x = left + room * (series.peak + 0.5);
  svg.append(drawn("path", { d: `M ${x} ${y(peak.total_bytes) - 4} l -5 -9 h 10 z`, class: "mark" }));
  phases(series.instants, (at) => left + room * at, svg, height - bottom);
  of("timeline").replaceChildren(svg);
  legend("timeline-legend", series.instants);
  of("timeline-note").textContent = `Highest: ${peak.name}. One column for each named moment; point at one for its name.${series.caption.lines.slice(2).map((line) => ` ${line}.`).join("")}`;
}

function instant(svg, one, x, wide, y) {
  let below = 0;
  const group = drawn("g", {}, drawn("title", {}, `${one.phase}: ${one.name}, ${size(one.total_bytes)}`));
  for (const part of one.parts) {
    const [from, to] = [y(below), y(below + part.n_bytes)];
    group.append(drawn("rect", { x, y: to, width: wide + 0.4, height: Math.max(0, from - to), fill: state.colours[part.what] }));
    below += part.n_bytes;
  }
  svg.append(group);
}

function phases(instants, x, svg, floor) {
  let from = 0;
  instants.forEach((one, at) => {
    if (at + 1 < instants.length && instants[at + 1].phase === one.phase) return;
    const wide = x(at + 1) - x(from);
    svg.append(drawn("line", { x1: x(at + 1), x2: x(at + 1), y1: floor, y2: floor + 8, class: "rule" }));
    const narrow = one.phase.length * 6 > wide, last = at + 1 === instants.length;
    const where = narrow ? { x: last ? x(at + 1) : x(from), y: floor + 32, "text-anchor": last ? "end" : "start" } : { x: (x(from) + x(at + 1)) / 2, y: floor + 18, "text-anchor": "middle" };
    svg.append(drawn("text", { ...where, class: "faint" }, one.phase));
    from = at + 1;
  });
}

function ledger(estimate) {
  const rows = [...estimate.peak.lines].sort((one, other) => other.bytes - one.bytes);
  const body = rows.map((line) => node("tr", {}, node("td", {}, line.kind), number(gb(line.bytes)), number(gib(line.bytes)), node("td", {}, line.reason), node("td", {}, line.formula)));
  const total = node("tr", {}, node("th", { scope: "row" }, "together"), number(gb(estimate.peak.allocated_bytes)), number(gib(estimate.peak.allocated_bytes)), node("td", {}), node("td", {}));
  of("ledger").replaceChildren(heading(["kind", "GB", "GiB", "why", "formula"], [1, 2]), node("tbody", {}, ...body, total));
}

function sent(communication) {
  of("sent-sum").textContent = communication.total_bytes ? `${size(communication.total_bytes)}, ${communication.relative_to_ddp.toFixed(2)}x the elements of plain data parallelism` : "Nothing is sent: there is one rank.";
  const body = communication.collectives.map((one) => node("tr", {}, node("td", {}, one.operation), number(one.calls.toLocaleString("en")), number(gb(one.sent_bytes)), number(gib(one.sent_bytes)), node("td", {}, `${one.what}, ${one.when}`)));
  of("sent").replaceChildren(...(body.length ? [heading(["collective", "calls", "GB", "GiB", "of what, when"], [1, 2, 3]), node("tbody", {}, ...body)] : []));
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

/** Draw the pictures anew where their place has become another. */
function redraw() {
  if (!state.told) return;
  stages(state.told.stages, state.told.estimate.job.recipe.zero_stage);
  timeline(state.told.timeline);
}
addEventListener("resize", () => { clearTimeout(state.resized); state.resized = setTimeout(redraw, WAIT_MS); });

async function begin() {
  const told = of("told");
  if (told) { // a report: one answer, which stands in the page
    const { colours, answer, changes: found } = JSON.parse(told.textContent);
    state.colours = colours;
    show(answer);
    showChanges(found);
    return;
  }
  const found = await fetched("/api/controls");
  if (found.error) { refuse(found.error); return; }
  build(found);
  await ask(addressed());
}

/** How high the head of the page is, below which the controls stay and to which a jump leads. */
const measured = () => document.documentElement.style.setProperty("--head", `${document.querySelector("header").offsetHeight}px`);
new ResizeObserver(measured).observe(document.querySelector("header"));

begin();
