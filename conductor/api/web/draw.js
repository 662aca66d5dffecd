// What every view is drawn with: numbers as people read them, elements, and charts.
//
// Values become text (textContent), never markup: a request's id is its client's. `morph` changes what is shown into
// what is wanted, element by element, so that focus, selection and scrolling outlive a refresh. The functions above
// "Elements" are pure, and tested without a browser.

export const WIDTH = 360, HEIGHT = 120; // of a chart, in its own units

const NOTHING = "–";
const NUMBERS = new Intl.NumberFormat("en"); // made once: toLocaleString makes one for each number
export const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

export function seconds(value) {
  if (!known(value)) return NOTHING;
  if (value === 0) return "0 s";
  if (Math.abs(value) < 1e-3) return `${Number((value * 1e6).toPrecision(2))} µs`;
  if (Math.abs(value) < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return Math.abs(value) < 120 ? `${Number(value.toPrecision(3))} s` : age(value);
}

// Long ago, in the two largest units.
export function age(value) {
  if (!known(value)) return NOTHING;
  const s = Math.max(0, Math.round(value));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s % 60 && s < 600 ? ` ${s % 60} s` : ""}`;
  if (s < 172800) return `${Math.floor(s / 3600)} h${Math.floor((s % 3600) / 60) ? ` ${Math.floor((s % 3600) / 60)} min` : ""}`;
  return `${Math.floor(s / 86400)} days`;
}

export function percent(share) {
  return known(share) ? `${(100 * share).toFixed(share < 0.0995 || (share > 0.995 && share < 1.0005) ? 1 : 0)} %` : NOTHING;
}

export function count(value) {
  if (!known(value)) return NOTHING;
  if (Math.abs(value) >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  return NUMBERS.format(Math.abs(value) >= 1000 ? Math.round(value) : value.toPrecision(3));
}

// A number of things, as "1 token" and "2 tokens".
export const counted = (value, thing) => `${count(value)} ${thing}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  if (!known(value)) return NOTHING;
  const power = value >= 1 ? Math.min(4, Math.floor(Math.log10(value) / 3)) : 0;
  return `${count(value / 1000 ** power)} ${["", "k", "M", "G", "T"][power]}B`;
}

export const UNITS = {
  s: seconds, share: percent, count, "1/s": (value) => `${count(value)}/s`, "B/s": (value) => `${bytes(value)}/s`,
};

const MINUTES = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const SECONDS = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function clock(atS, withDate = false, withSeconds = false) {
  const at = new Date(atS * 1e3);
  const time = (withSeconds ? SECONDS : MINUTES).format(at);
  return withDate ? `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}` : time;
}

// The least of 1, 2, 2.5 and 5 times a power of ten that is not below `value`.
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= value * 0.9999);
}

// [x, y or null] of each bin of a column: `how` is mean or max, of what is known.
export function binned(column, bins, how) {
  const found = [], size = Math.max(1, column.length / bins);
  for (let from = 0; from < column.length; from += size) {
    let [sum, many, most] = [0, 0, -Infinity];
    for (let at = Math.floor(from); at < Math.min(column.length, Math.floor(from + size)); at += 1) {
      const value = column[at];
      if (Number.isNaN(value)) continue;
      sum += value; many += 1; most = Math.max(most, value);
    }
    if (Math.floor(from + size) > Math.floor(from)) found.push([from + size / 2, many ? (how === "max" ? most : sum / many) : null]);
  }
  return found;
}

// SVG paths of points: pieces of a line where they are known; a lone point is a short dash.
export function path(points, x, y) {
  const pieces = [];
  let piece = [];
  for (const [at, value] of [...points, [0, null]]) {
    if (value !== null) piece.push([x(at), y(value)]);
    else if (piece.length) { pieces.push(piece); piece = []; }
  }
  return pieces.map((dots) => (dots.length === 1
    ? `M${(dots[0][0] - 1).toFixed(1)} ${dots[0][1].toFixed(1)}h2`
    : `M${dots.map(([left, top]) => `${left.toFixed(1)} ${top.toFixed(1)}`).join("L")}`)).join("");
}

// Elements

export function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

const keyOf = (node) => (node.nodeType === 1 ? node.getAttribute("data-key") : null);
const alike = (shown, wanted) => shown.nodeName === wanted.nodeName && keyOf(shown) === keyOf(wanted);

// Make the children of `parent` those wanted, keeping every element that is alike.
export function morph(parent, wanted) {
  const keys = new Set(wanted.map(keyOf).filter((key) => key !== null));
  const keyed = new Map();
  for (const child of [...parent.childNodes]) {
    const key = keyOf(child);
    if (key === null) continue;
    if (keys.has(key)) keyed.set(key, child); else child.remove();
  }
  let at = parent.firstChild;
  for (const fresh of wanted) {
    const key = keyOf(fresh);
    const shown = key !== null ? keyed.get(key) : at && keyOf(at) === null ? at : null;
    if (shown && alike(shown, fresh)) {
      if (shown !== at) parent.insertBefore(shown, at);
      change(shown, fresh);
      at = shown.nextSibling;
    } else parent.insertBefore(fresh, at);
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

function change(shown, wanted) {
  if (shown.nodeType !== 1) { if (shown.data !== wanted.data) shown.data = wanted.data; return; }
  if (shown.hasAttribute("data-kept")) return; // what its user is at, a form say, is left alone
  for (const { name } of [...shown.attributes]) if (!wanted.hasAttribute(name) && name !== "open" && name !== "tabindex") shown.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (shown.getAttribute(name) !== value && name !== "tabindex") shown.setAttribute(name, value);
  morph(shown, [...wanted.childNodes]);
}

// A table; a column is a name, or a name and what it means.
export function table(caption, columns, rows) {
  const named = columns.map((column) => [column].flat());
  for (const each of rows) named.forEach(([name], at) => name && each.children[at]?.setAttribute("data-label", name)); // for telephones
  const head = element("tr", {}, named.map(([name, meaning]) => element("th", { scope: "col", title: meaning ?? null }, name)));
  return element("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 },
    element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, rows)));
}

export const row = (cells, attributes = {}) => element("tr", attributes, cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell))));

// A bar of parts of a whole, [share, class]: for the eye, beside the number.
export function bar(parts) {
  const svg = element("svg:svg", { viewBox: "0 0 100 8", class: "bar", "aria-hidden": "true", preserveAspectRatio: "none" });
  let x = 0;
  for (const [share, kind] of parts) {
    const width = Math.max(0, Math.min(100 - x, 100 * (share || 0)));
    svg.append(element("svg:rect", { x: x.toFixed(1), y: 0, width: width.toFixed(1), height: 8, class: kind }));
    x += width;
  }
  return svg;
}

// What words mean, to be opened: names and meanings. What has a title alone, a telephone and a keyboard never show.
export const words = (summary, terms) => element("details", { class: "words", "data-key": summary }, element("summary", {}, summary),
  element("dl", {}, terms.map(([name, meaning]) => element("div", {}, element("dt", {}, name), element("dd", {}, meaning)))));

export const TTFT = ["TTFT", "Time to first token: the seconds from a request's arrival to the first token of its answer."];
export const TBT = ["TBT", "Time between tokens: the mean over one request's answer. Bounds on TBT are on this mean."];
export const P99 = ["p99", "Of the requests meant, 99 in 100 were no slower; p90 and median likewise."];
export const KV = ["KV", "What the model has computed of a text so far and needs for its next token, in blocks of some tokens. A prompt that begins as an earlier one may use its blocks: a hit."];

export const empty = (...words) => element("p", { class: "empty" }, ...words);

// A chart of lines over time: {title, means, unit, lines: [{label, column, how}], bound, fromS, stepS, atS}. `atS`: a
// moment that is marked, whose values the legend has instead of the last ones.
export function chart({ title, means, unit, lines, bound, fromS, stepS, withDate, atS }) {
  const say = UNITS[unit], bins = WIDTH / 2;
  const drawn = lines.filter(({ column }) => column.length).map((line) => ({ ...line, points: binned(line.column, bins, line.how) }));
  const length = Math.max(1, ...lines.map(({ column }) => column.length));
  const values = drawn.flatMap(({ points }) => points.map(([, value]) => value).filter((value) => value !== null));
  const figure = (...content) => element("figure", { class: "chart", "data-key": title, "data-from": fromS, "data-step": stepS, "data-rows": length }, element("figcaption", { title: means ?? null }, title), ...content);
  if (!values.length) return figure(empty("Nothing to say yet: a line begins with the first request."));
  const top = unit === "share" ? 1 : niceTop(Math.max(...values, known(bound) && bound < 3 * Math.max(...values) ? bound : 0));
  const x = (at) => (WIDTH * at) / length, y = (value) => HEIGHT - (HEIGHT * Math.min(value, top)) / top;
  const end = known(atS) ? Math.min(length - 1, Math.max(0, Math.floor((atS - fromS) / stepS))) : length - 1;
  const last = (column) => { for (let at = end; at >= Math.max(0, end - 59); at -= 1) if (!Number.isNaN(column[at])) return column[at]; return null; };
  const labels = drawn.map(({ label, column }) => `${label} ${say(last(column))}`).join(", ");
  const svg = element("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none",
    "aria-label": `${title}, ${known(atS) ? `at ${clock(atS, false, true)}` : "last"}: ${labels}; the scale ends at ${say(top)}` });
  for (const share of [0, 0.5, 1]) svg.append(element("svg:path", { class: "grid", d: `M0 ${(HEIGHT * share).toFixed(1)}h${WIDTH}` }));
  drawn.forEach(({ points }, number) => svg.append(element("svg:path", { class: `line line${number}`, d: path(points, x, y) })));
  if (known(bound) && bound <= top) svg.append(element("svg:path", { class: "bound", d: `M0 ${y(bound).toFixed(1)}h${WIDTH}` }));
  if (known(atS)) svg.append(element("svg:path", { class: "cursor", d: `M${x(end + 0.5).toFixed(1)} 0V${HEIGHT}` }));
  const untilS = fromS + length * stepS;
  return figure(
    element("div", { class: "plot" }, element("span", { class: "top" }, say(top)), svg),
    element("div", { class: "axis" }, [0, 0.5, 1].map((share) => element("span", {}, clock(fromS + share * (untilS - fromS), withDate)))),
    element("ul", { class: "legend" }, drawn.map(({ label, column }, number) => element("li", { class: `line${number}` }, `${label} `, element("b", {}, say(last(column))))),
      known(bound) ? element("li", { class: "bound" }, "bound ", element("b", {}, say(bound))) : null));
}

// The moment of a chart at which a pointer is, in seconds since 1970; null: it is at no chart.
export function momentAt(event) {
  const plot = event.target.closest?.(".plot"), figure = plot?.closest("figure[data-rows]");
  if (!figure) return null;
  const { left, width } = plot.getBoundingClientRect(), share = Math.min(0.9999, Math.max(0, (event.clientX - left) / width));
  return Number(figure.dataset.from) + Math.floor(share * Number(figure.dataset.rows)) * Number(figure.dataset.step);
}
