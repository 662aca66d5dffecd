// KV on its way: a curve from node to node, its bytes a second beside it, and dots that run along it.
//
// The curves stand still, and what moves is moved by the compositor alone: a dot is painted once, and an animation of its
// transform takes it along the curve. Nothing is painted anew while it runs, on a machine without a GPU neither.

import { bytes, element } from "./draw.js";

const FLOWS = 24, DOTS = 32, LEAST = 1e-3; // each dot that moves costs every frame some 50 µs
const LABELS = 12, NARROW = 600, SAMPLES = 12;
const LABEL = { width: 74, height: 17 };
const PLACES = [0.5, 0.36, 0.64, 0.24, 0.76]; // along a curve, for its label

// The links worth a line: the highest, without those that hardly flow any more.
export const flowing = (links) => links.slice(0, FLOWS).filter(([, , rate]) => rate > LEAST * links[0][2]);

let shownIn = null, shown = new Map(); // by link: {d, strength, dots}

const between = ([a, b, c, d], t) => [0, 1].map((axis) => (1 - t) ** 3 * a[axis] + 3 * (1 - t) ** 2 * t * b[axis] + 3 * (1 - t) * t ** 2 * c[axis] + t ** 3 * d[axis]);

// The four points of the curve between two boxes, in a frame.
export function curve(a, b, frame) {
  const isBeside = a.left < b.left - 4 || a.left > b.left + 4, isRight = a.left < b.left - 4;
  const sides = !isBeside ? [a.right, b.right] : isRight ? [a.right, b.left] : [a.left, b.right];
  const [x1, x2] = sides.map((x) => x - frame.left), [y1, y2] = [a, b].map((box) => box.top + box.height / 2 - frame.top);
  const bend = isBeside ? (x2 - x1) / 2 : 40;
  return [[x1, y1], [x1 + bend, y1], [isBeside ? x2 - bend : x2 + bend, y2], [x2, y2]];
}

// Where the labels of curves may stand without lying over another or over a box: [x, y], or null.
export function labelled(curves, boxes) {
  const taken = boxes.map(({ left, top, width, height }) => [left, top, left + width, top + height]);
  return curves.map((points) => {
    for (const t of PLACES) {
      const [x, y] = between(points, t), box = [x - LABEL.width / 2, y - LABEL.height, x + LABEL.width / 2, y];
      if (taken.some(([left, top, right, bottom]) => box[0] < right && left < box[2] && box[1] < bottom && top < box[3])) continue;
      taken.push(box);
      return [x, y - 4];
    }
    return null;
  });
}

function dotted(dots, points, strength, most) {
  const [wish, seconds] = { strong: [5, 1.6], middling: [4, 2.6], weak: [3, 4] }[strength], many = Math.min(wish, most);
  const frames = Array.from({ length: SAMPLES + 1 }, (_, at) => { const [x, y] = between(points, at / SAMPLES); return { transform: `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)` }; });
  return Array.from({ length: many }, (_, at) => {
    const dot = dots.appendChild(element("i", { class: strength }));
    dot.animate(frames, { duration: 1000 * seconds, iterations: Infinity, delay: (-1000 * seconds * at) / many });
    return dot;
  });
}

export function flow(view, links) {
  const [svg, dots, picture] = ["#flows", "#dots", "#picture"].map((id) => view.querySelector(id));
  if (!svg) return;
  if (shownIn !== dots) [shownIn, shown] = [dots, new Map()];
  const highest = flowing(links), ends = new Set(highest.flatMap(([from, to]) => [from, to]));
  const frame = picture.getBoundingClientRect(), nodes = [...picture.querySelectorAll("[data-node]")];
  const boxes = new Map(nodes.filter(({ dataset }) => ends.has(dataset.node)).map((node) => [node.dataset.node, node.getBoundingClientRect()]));
  const known = highest.filter(([from, to]) => boxes.has(from) && boxes.has(to));
  const most = Math.max(1, ...known.map(([, , rate]) => rate)), isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  const wanted = new Map(known.map(([from, to, rate]) => [`${from} ${to}`, { points: curve(boxes.get(from), boxes.get(to), frame), rate, strength: rate > 0.5 * most ? "strong" : rate > 0.1 * most ? "middling" : "weak" }]));
  for (const [key, { path, moving }] of shown) if (!wanted.has(key)) { path.remove(); moving.forEach((dot) => dot.remove()); shown.delete(key); }
  for (const [key, { points: [a, b, c, e], points, strength }] of wanted) {
    const d = `M${a.map(Math.round).join(" ")}C${[b, c, e].map((point) => point.map(Math.round).join(" ")).join(" ")}`, before = shown.get(key);
    if (before?.d === d && before.strength === strength && before.isStill === isStill) continue;
    before?.moving.forEach((dot) => dot.remove());
    const path = before?.path ?? svg.appendChild(element("svg:path", { "data-key": key }));
    path.setAttribute("d", d);
    path.setAttribute("class", `flow ${strength}`);
    shown.set(key, { d, strength, isStill, path, moving: isStill ? [] : dotted(dots, points, strength, Math.max(1, Math.floor(DOTS / wanted.size))) });
  }
  label(svg, frame, [...wanted].slice(0, LABELS), [...boxes.values()]);
}

// The rates, where there is room: the table below has them all.
function label(svg, frame, flows, boxes) {
  const inside = boxes.map(({ left, top, width, height }) => ({ left: left - frame.left, top: top - frame.top, width, height }));
  const places = frame.width < NARROW ? [] : labelled(flows.map(([, { points }]) => points), inside);
  const said = flows.map(([key, { rate }], at) => ({ key, text: `${bytes(rate)}/s`, place: places[at] })).filter(({ place }) => place);
  const texts = new Map([...svg.querySelectorAll("text")].map((text) => [text.dataset.key, text]));
  for (const { key, text, place: [x, y] } of said) {
    const one = texts.get(key) ?? svg.appendChild(element("svg:text", { "data-key": key, class: "rate" }));
    texts.delete(key);
    if (one.textContent !== text) one.textContent = text;
    one.setAttribute("x", x.toFixed(0));
    one.setAttribute("y", y.toFixed(0));
  }
  for (const gone of texts.values()) gone.remove();
}
