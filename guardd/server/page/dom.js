// Elements from text only: nothing an agent wrote is ever parsed as HTML.

/** An element. attributes: as written in HTML; a function is a listener; null and false are left out. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...shown(children));
  return element;
}

const shown = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== "");

/** Puts children in the place of what an element holds; keeps the focus on what has taken the place of what had it. */
export function fill(element, ...children) {
  const focused = document.activeElement;
  const isInside = element !== focused && element.contains(focused);
  element.replaceChildren(...shown(children));
  if (isInside) focusAgain(focused);
}

/** A drawing that is made only of news: nothing moves, or is read aloud again, while what was found stays the same. */
export function whenNew(draw) {
  let drawn = "";
  return (...found) => {
    const text = JSON.stringify(found);
    if (text === drawn) return;
    drawn = text;
    draw(...found);
  };
}

/** Focuses an element, or what has taken its place since: the same id, link or label. Else the content: never nothing. */
export function focusAgain(element) {
  if (!element.isConnected) {
    const names = ["id", "href", "aria-label"].filter((name) => element.hasAttribute(name));
    element = names.length > 0 && [...document.querySelectorAll(element.localName)].find(
      (each) => names.every((name) => each.getAttribute(name) === element.getAttribute(name)));
  }
  if (element && element !== document.body && !element.disabled) element.focus({ preventScroll: true });
  else document.getElementById("main").focus({ preventScroll: true });
}

export const runLink = (run, text = run) => h("a", { href: `#/runs/${encodeRun(run)}` }, text);
export const encodeRun = (run) => run.split("/").map(encodeURIComponent).join("/");

/** "3 s ago"; the exact time stands in the title. */
export function ago(ms) {
  const when = new Date(Number(ms));
  return h("time", { datetime: when.toISOString(), title: when.toLocaleString() }, agoText(when));
}

const agoText = (when) => `${span(Date.now() - when)} ago`;

/** Times go on without anything being drawn anew. */
export function tick() {
  for (const time of document.querySelectorAll("time")) time.textContent = agoText(new Date(time.dateTime));
}

/** A length of time in its largest unit. */
export function span(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** What is said to everybody, screen readers included, about something that was done. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** State of a run as a badge: a word and a sign, not a colour alone. */
export function badge(run) {
  const state = run.freeze && run.status === "running" ? "frozen" : run.status;
  const sign = { running: "▶", waiting: "⏸", frozen: "❄", ended: run.reason === "complete" ? "✓" : "■" }[state] ?? "?";
  const kind = state === "ended" ? (run.reason === "complete" ? "done" : "stopped") : state;
  return h("span", { class: `badge ${kind}` }, h("span", { "aria-hidden": "true" }, `${sign} `), state);
}

/** A table with a caption for screen readers and headers. rows: arrays of cells. */
export function table(caption, heads, rows, empty) {
  if (rows.length === 0) return h("p", { class: "empty" }, empty);
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))));
}
