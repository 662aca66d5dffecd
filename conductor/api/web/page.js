// The page at /ui. It asks /status, /metrics and /v1/explain every other second and draws what they say; and the
// panels of the dashboard that is chosen, /v1/panels/NAME, every 15 seconds.
//
// Values become text (textContent, createTextNode), never markup: a request's id is its client's.
// The functions above "The document" are pure, and tested without a browser.
"use strict";

const PERIOD_MS = 2000;
const WINDOW = 30; // looks at the counters, over which rates and shares are taken: a minute
const PANELS_PERIOD_MS = 15000;
const SVG = "http://www.w3.org/2000/svg";

// Prometheus text to a Map of "name{labels}" to number.
function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const space = line.lastIndexOf(" ");
    if (space > 0 && !line.startsWith("#")) samples.set(line.slice(0, space), Number(line.slice(space + 1)));
  }
  return samples;
}

// What was added to a counter from one look to the next; a counter that fell has begun anew.
function added(name, first, last) {
  const now = last.get(name) ?? 0;
  const before = first.get(name) ?? 0;
  return now >= before ? now - before : now;
}

// The q-quantile of a histogram's observations between two looks, in its unit; null: there were none.
function quantile(q, name, first, last) {
  const buckets = [];
  const pattern = new RegExp(`^${name}_bucket\\{le="([^"]+)"\\}$`);
  for (const key of last.keys()) {
    const found = pattern.exec(key);
    if (found) buckets.push([found[1] === "+Inf" ? Infinity : Number(found[1]), added(key, first, last)]);
  }
  buckets.sort((a, b) => a[0] - b[0]);
  const total = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (!total) return null;
  let [below, counted] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= q * total) {
      if (bound === Infinity) return below;
      return below + (bound - below) * (q * total - counted) / Math.max(1, count - counted);
    }
    [below, counted] = [bound, count];
  }
  return below;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(1)} %`;
}

function count(value) {
  return value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toLocaleString("en");
}

// The numbers at the top of the page.
function numbers(status, first, last, elapsedS) {
  const prompt = added("conductor_prompt_tokens_total", first, last);
  const cached = added("conductor_cached_tokens_total", first, last);
  const rate = (name) => (elapsedS > 0 ? added(name, first, last) / elapsedS : null);
  return [
    ["requests running", count(status.running_requests)],
    ["waiting at the conductor", count(status.waiting_requests)],
    ["waiting on nodes", count(last.get("conductor_waiting_sequences") ?? 0)],
    ["prefix hit rate, last minute", percent(prompt ? cached / prompt : null)],
    ["TTFT, median", seconds(quantile(0.5, "conductor_ttft_seconds", first, last))],
    ["TTFT, 99th percentile", seconds(quantile(0.99, "conductor_ttft_seconds", first, last))],
    ["TBT, 99th percentile", seconds(quantile(0.99, "conductor_tbt_seconds", first, last))],
    ["tokens a second", count(rate("conductor_generation_tokens_total"))],
    ["KV blocks held", percent(last.get("conductor_kv_usage_ratio") ?? 0)],
  ];
}

// Nodes by column.
function pools(nodes) {
  const found = { "prefill pool": [], "both roles": [], "decode pool": [], storage: [] };
  const names = { prefill: "prefill pool", decode: "decode pool", "decode+prefill": "both roles" };
  for (const node of nodes) found[names[node.roles.join("+")] ?? "storage"].push(node);
  return found;
}

function clipped(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

function heldShare(node) {
  return node.blocks && node.held_blocks ? node.held_blocks / node.blocks : 0;
}

// The lines and tables of one attempt: [heading, text] and {title, columns, rows, chosen}.
function explained(attempt) {
  const lines = [["asked", `${attempt.asked.num_tokens} prompt tokens, at most ${attempt.asked.max_tokens} new`]];
  const placed = attempt.placed;
  if (placed) {
    const from = placed.source_node ? `, prefix from ${placed.source_node}` : "";
    lines.push(["placed", `prefill on ${placed.prefill_node}, decode on ${placed.decode_node}${from}`]);
    lines.push(["predicted", `TTFT ${seconds(attempt.waited_s + placed.predicted_ttft_s)} (waiting ${seconds(attempt.waited_s)}, ` +
      `queue ${seconds(placed.queue_s)}, fetch ${seconds(placed.fetch_s)}, prefill ${seconds(placed.prefill_s)}, ` +
      `hand-off ${seconds(placed.handoff_s)}), TBT ${seconds(placed.predicted_tbt_s)}`]);
  } else {
    lines.push(["rejected", `${attempt.rejected.reason}; predicted TTFT ${seconds(attempt.rejected.predicted_ttft_s)}, ` +
      `TBT ${seconds(attempt.rejected.predicted_tbt_s)}`]);
  }
  const actual = attempt.actual;
  if (actual) {
    lines.push(["actual", `TTFT ${seconds(actual.ttft_s)} (queue ${seconds(actual.queue_s)}, prefill ${seconds(actual.compute_s)}, ` +
      `transfer ${seconds(actual.exposed_transfer_s)}), TBT ${seconds(actual.mean_tbt_s)}, ${actual.num_output_tokens} tokens, ${actual.end}`]);
  }
  const cell = (name, value) => (name.endsWith("_s") ? seconds(value) : typeof value === "number" ? count(value) : String(value ?? ""));
  const table = (title, rows, columns, chosen) => ({
    title,
    columns: ["node", ...columns.map((name) => name.replace(/_s$/, "").replaceAll("_", " "))],
    rows: (rows ?? []).map((row) => [row.node, ...columns.map((name) => cell(name, row[name]))]),
    chosen,
  });
  const prefill = ["queue_s", "fetch_s", "prefill_s", "ready_s", "others_s", "local_blocks", "matched_blocks", "fetch_from"];
  const decode = ["tbt_s", "sequences", "free_tokens", "matched_blocks", "fits"];
  return {
    lines,
    tables: [
      table("could prefill, soonest first", attempt.prefill_candidates, prefill, placed?.prefill_node),
      table("could decode, shortest step first", attempt.decode_candidates, decode, placed?.decode_node),
    ],
  };
}

// A number as the unit of a panel has it; the names are Grafana's.
function inUnit(unit, value) {
  if (unit === "s") return seconds(value);
  if (unit === "percentunit") return percent(value);
  if (unit === "reqps") return `${count(value)}/s`;
  if (unit !== "Bps") return count(value);
  const power = value >= 1 ? Math.min(4, Math.floor(Math.log10(value) / 3)) : 0;
  return `${count(value / 1000 ** power)} ${["", "k", "M", "G", "T"][power]}B/s`;
}

// The lines of a panel as points of SVG polylines, from 0 up, and what the corners stand for; null: nothing to draw.
function drawn(series, width, height) {
  const points = series.flatMap((line) => line.points);
  if (!points.length) return null;
  const times = points.map(([atS]) => atS);
  const [fromS, untilS, top] = [Math.min(...times), Math.max(...times), Math.max(...points.map(([, value]) => value))];
  const x = (atS) => (untilS > fromS ? (width * (atS - fromS)) / (untilS - fromS) : width);
  const y = (value) => height - (top > 0 ? (height * value) / top : 0);
  const lines = series.map((line) => line.points.map(([atS, value]) => `${x(atS).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  return { lines, top, fromS, untilS };
}

// The document

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function fill(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
}

function table(columns, rows, mark = () => ({})) {
  const head = element("tr", {}, ...columns.map((column) => element("th", {}, column)));
  const body = rows.map((row) => element("tr", mark(row), ...row.map((value) => element("td", {}, value))));
  return [element("thead", {}, head), element("tbody", {}, ...body)];
}

// Where the conductor, the names of pools and the boxes of nodes are: side by side, or below each other on a telephone.
function laidOut(groups, narrow) {
  const [boxWidth, rowHeight] = [narrow ? 250 : 190, 52];
  const width = narrow ? 340 : 760;
  const names = [], boxes = [], lines = [];
  let below = 84; // where the next pool begins, on a telephone
  groups.forEach(([pool, members], index) => {
    const centre = narrow ? 60 + boxWidth / 2 : (width * (index + 0.5)) / groups.length;
    const top = narrow ? below : 84;
    names.push({ x: centre, y: top + 14, text: `${pool}: ${members.length}` });
    lines.push(narrow ? { x1: 30, y1: 36, x2: 30, y2: top + 40 } : { x1: width / 2, y1: 36, x2: centre, y2: top });
    if (narrow) lines.push({ x1: 30, y1: top + 40, x2: 60, y2: top + 40 });
    members.forEach((node, row) => boxes.push({ node, x: centre - boxWidth / 2, y: top + 22 + row * rowHeight }));
    below = top + 40 + members.length * rowHeight;
  });
  const height = Math.max(120, ...boxes.map(({ y }) => y + rowHeight));
  return { width, height, boxWidth, boxHeight: rowHeight - 10, middle: narrow ? 75 : width / 2, names, boxes, lines };
}

function drawTopology(nodes) {
  const groups = Object.entries(pools(nodes)).filter(([, members]) => members.length);
  const shown = laidOut(groups, matchMedia("(max-width: 40rem)").matches);
  const svg = element("svg:svg", { viewBox: `0 0 ${shown.width} ${shown.height}`, role: "img" });
  shown.lines.forEach((line) => svg.append(element("svg:line", line)));
  shown.names.forEach(({ x, y, text }) => svg.append(element("svg:text", { x, y, "text-anchor": "middle" }, text)));
  const [width, height] = [shown.boxWidth, shown.boxHeight];
  shown.boxes.forEach(({ node, x, y }) => {
    svg.append(element("svg:rect", { x, y, width, height, rx: 5, class: node.draining ? "draining" : "" }));
    svg.append(element("svg:rect", { x, y: y + height - 5, width: width * heldShare(node), height: 5, class: "use" }));
    const load = `${node.running ?? 0} running, ${node.waiting ?? 0} waiting${node.draining ? ", draining" : ""}`;
    svg.append(element("svg:svg", { x: x + 8, y, width: width - 16, height }, // what is too long ends at the box
      element("svg:title", {}, `${node.id} · ${node.host}`),
      element("svg:text", { y: 16 }, clipped(`${node.id} · ${node.host}`, Math.floor(width / 8))),
      element("svg:text", { y: 31 }, load)));
  });
  svg.append(element("svg:rect", { x: shown.middle - 60, y: 8, width: 120, height: 28, rx: 5 }));
  svg.append(element("svg:text", { x: shown.middle, y: 26, "text-anchor": "middle" }, "conductor"));
  fill("topology", svg);
}

function drawNodes(nodes) {
  const columns = ["node", "host", "roles", "running", "waiting", "tokens queued", "blocks held", "", "transports", ""];
  fill("nodes", ...table(columns, nodes.map((node) => [
    node.id, node.host, node.roles.join("+"), count(node.running), count(node.waiting), count(node.queued_tokens),
    `${count(node.held_blocks)} of ${count(node.blocks)}`, element("meter", { min: 0, max: 1, value: heldShare(node) }),
    node.transports.join(", "), node.draining ? "draining" : "",
  ])));
}

let chosen = null;

function drawRequests(requests) {
  const columns = ["request", "age", "state", "prompt", "cached", "prefill", "decode", "TTFT", "predicted", "TBT", "new tokens"];
  fill("requests", ...table(columns, requests.map((row) => [
    row.request_id, seconds(row.age_s), row.state, count(row.num_tokens), count(row.num_cached_tokens),
    (row.prefill_node ?? "") + (row.source_node ? ` ← ${row.source_node}` : ""), row.decode_node ?? "",
    seconds(row.ttft_s), seconds(row.predicted_ttft_s), seconds(row.mean_tbt_s), count(row.num_output_tokens),
  ]), ([id]) => ({ "data-id": id, tabindex: 0, class: id === chosen ? "chosen" : "" })));
}

async function explain(id) {
  chosen = id;
  for (const row of document.querySelectorAll("#requests tbody tr")) row.classList.toggle("chosen", row.dataset.id === id);
  document.getElementById("explained").textContent = id;
  document.getElementById("explanation").hidden = false;
  const told = JSON.parse(await ask(`v1/explain/${encodeURIComponent(id)}`));
  fill("attempts", ...told.attempts.flatMap((attempt) => {
    const { lines, tables } = explained(attempt);
    const story = lines.map(([name, text]) => element("tr", {}, element("th", {}, name), element("td", {}, text)));
    return [element("table", { class: "story" }, ...story), ...tables.flatMap(({ title, columns, rows, chosen: best }) => [
      element("h3", {}, title),
      element("table", {}, ...table(columns, rows, ([node]) => ({ class: node === best ? "chosen" : "" }))),
    ])];
  }));
}

let apiKey = "";

async function ask(path) {
  const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
  const response = await fetch(path, { headers, signal: AbortSignal.timeout(10000) });
  document.getElementById("key").hidden = response.status !== 401;
  if (!response.ok) throw new Error(`${path}: status ${response.status}`);
  return response.text();
}

function tell(problem) {
  const place = document.getElementById("problem");
  place.textContent = problem;
  place.hidden = !problem;
}

let board = 0;

async function showBoards() {
  const shown = board;
  const told = JSON.parse(await ask("v1/panels"));
  document.getElementById("no-values").hidden = told.has_values;
  fill("boards", ...told.boards.map(({ title }, number) => element("button", {
    role: "tab", "data-board": number, "aria-selected": String(number === shown) }, title.replace("Conductor: ", ""))));
  const values = await Promise.all(told.boards[shown].panels.map(
    ({ name }) => (told.has_values ? ask(`v1/panels/${name}`).then(JSON.parse) : null)));
  if (shown !== board) return; // another was chosen meanwhile
  fill("panels", ...told.boards[shown].panels.map((panel, number) => panelElement(panel, values[number])));
}

function panelElement(panel, values) {
  const [width, height] = [320, 110];
  const parts = [element("h3", {}, panel.title)];
  const chart = values && drawn(values.series, width, height);
  if (chart) {
    const svg = element("svg:svg", { viewBox: `0 0 ${width} ${height + 2}`, role: "img", "aria-label": panel.title });
    chart.lines.forEach((points, line) => svg.append(element("svg:polyline", { points, class: `line${line % 6}` })));
    const clock = (atS) => new Date(atS * 1e3).toLocaleTimeString();
    parts.push(element("div", { class: "axis" }, element("span", {}, inUnit(panel.unit, chart.top)), element("span", {}, `${clock(chart.fromS)} to ${clock(chart.untilS)}`)));
    parts.push(svg, element("ul", {}, ...values.series.map(({ legend, points }, line) => element("li", { class: `line${line % 6}` },
      `${legend || "value"}: ${points.length ? inUnit(panel.unit, points[points.length - 1][1]) : "–"}`))));
  } else if (values) {
    parts.push(element("p", { class: "note" }, values.problem || "no data in the last hour"));
  }
  parts.push(element("details", values ? {} : { open: "" }, element("summary", {}, "query"), ...panel.queries.map((query) => element("code", {}, query))));
  return element("article", {}, ...parts);
}

const looks = []; // [milliseconds, samples], oldest first

async function look() {
  const [status, metrics, requests] = await Promise.all([ask("status"), ask("metrics"), ask("v1/explain")]);
  looks.push([performance.now(), parseMetrics(metrics)]);
  if (looks.length > WINDOW) looks.shift();
  const [[firstMs, first], [lastMs, last]] = [looks[0], looks[looks.length - 1]];
  const told = JSON.parse(status);
  const badge = document.getElementById("state");
  badge.textContent = told.ready ? "ready" : "not ready";
  badge.className = `badge ${told.ready ? "ok" : "bad"}`;
  fill("numbers", ...numbers(told, first, last, (lastMs - firstMs) / 1e3).map(
    ([name, value]) => element("div", { class: "number" }, element("b", {}, value), name)));
  drawTopology(told.nodes);
  drawNodes(told.nodes);
  drawRequests(JSON.parse(requests));
}

async function repeat() {
  try {
    await look();
    tell("");
  } catch (error) {
    tell(`The conductor does not answer: ${error.message}`);
  }
  setTimeout(repeat, PERIOD_MS);
}

async function repeatPanels() {
  await showBoards().catch((error) => tell(error.message));
  setTimeout(repeatPanels, PANELS_PERIOD_MS);
}

function start() {
  const choose = (event) => {
    const row = event.target.closest("tr[data-id]");
    if (row && (event.type === "click" || event.key === "Enter")) explain(row.dataset.id).catch((error) => tell(error.message));
  };
  document.getElementById("requests").addEventListener("click", choose);
  document.getElementById("requests").addEventListener("keydown", choose);
  document.getElementById("key").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey = event.target.querySelector("input").value;
    showBoards().catch((error) => tell(error.message));
  });
  document.getElementById("boards").addEventListener("click", (event) => {
    board = Number(event.target.dataset.board ?? board);
    showBoards().catch((error) => tell(error.message));
  });
  repeat();
  repeatPanels();
}

if (typeof document !== "undefined") start();
else module.exports = { parseMetrics, added, quantile, seconds, numbers, pools, explained, inUnit, drawn };
