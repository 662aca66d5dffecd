// What the page knows: answers of GET v1/page/NAME, the operator's key, and the history, of which only new rows are
// asked for. Everything that is shown comes through here.

export const PERIOD_MS = 2000;
const WHOLE_MS = 15000; // between two answers of a Prometheus, which are whole each time

let apiKey = "";
export const setKey = (secret) => { apiKey = secret.trim(); };
export const headers = () => (apiKey ? { Authorization: `Bearer ${apiKey}` } : {});

export class Refused extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

export async function ask(path, body = undefined, timeoutMs = 10000) {
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  let response;
  try {
    response = await fetch(path, { ...sent, headers: { ...headers(), ...type }, signal: AbortSignal.timeout(timeoutMs) });
  } catch (error) {
    throw new Refused(`The conductor does not answer (${error.message}). Is it running? conductor status says.`, 0);
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new Refused(answer.error?.message ?? `${path}: status ${response.status}`, response.status);
  }
  return response.json().catch((error) => { throw new Refused(`${path}: no JSON: ${error.message}`, 0); });
}

export const page = (name) => ask(`v1/page/${name.split(".").map(encodeURIComponent).join(".")}`);

const kept = new Map();

// An answer of which little changes in `periodMs`, asked for again only then.
export async function seldom(name, periodMs = 10000) {
  const before = kept.get(name);
  if (before && performance.now() - before.atMs < periodMs) return before.answer;
  const answer = await page(name);
  kept.set(name, { answer, atMs: performance.now() });
  return answer;
}

// Numbers of 32 bits in base64, row after row, to a column for each name.
export function columns({ names, rows }) {
  const packed = Uint8Array.from(atob(rows), (character) => character.charCodeAt(0));
  const view = new DataView(packed.buffer), found = {};
  const many = packed.length / 4 / names.length;
  names.forEach((name, place) => {
    found[name] = Float32Array.from({ length: many }, (_, at) => view.getFloat32(4 * (at * names.length + place), true));
  });
  return found;
}

// One ring of the conductor's, kept here as columns. `kept` rows at most.
export class Series {
  constructor(name, kept) { this.name = name; this.kept = kept; this.next = null; this.columns = {}; }

  async refresh() {
    if (this.whole && performance.now() - this.askedMs < WHOLE_MS) return this.whole;
    const answer = await page(this.next === null || this.whole ? this.name : `${this.name}.${this.next}`);
    this.whole = answer.source === "prometheus" ? answer : null;
    this.askedMs = performance.now();
    if (answer.source !== this.source) this.next = null; // other rows than before
    this.source = answer.source;
    this.take(answer);
    return answer;
  }

  take(answer) {
    const fresh = columns(answer);
    const follows = this.next !== null && answer.first === this.next;
    if (!this.whole && !follows && this.next !== null && answer.next <= this.next && answer.first <= this.next) return; // nothing new, or a conductor begun again
    for (const name of answer.names) {
      const before = follows ? this.columns[name] : new Float32Array(0);
      const joined = new Float32Array(before.length + fresh[name].length);
      joined.set(before); joined.set(fresh[name], before.length);
      this.columns[name] = joined.slice(Math.max(0, joined.length - this.kept));
    }
    this.next = answer.next;
    this.stepS = answer.step_s;
  }

  get length() { return Object.values(this.columns)[0]?.length ?? 0; }
  get fromS() { return (this.next - this.length) * this.stepS; }

  // The mean (or sum) of what is known in the last rows; null: nothing is.
  mean(name, rows) {
    const known = [...(this.columns[name] ?? []).slice(-rows)].filter((value) => !Number.isNaN(value));
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  }
}

export const hour = new Series("hour", 3600), day = new Series("day", 2880), week = new Series("week", 336);
