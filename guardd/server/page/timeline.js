// The timeline of a run: agents as lanes, a row a call, oldest first; the evidence of a refusal marked.

import { fill, h } from "/page/dom.js";

const ARGS_SHOWN = 300;
const KINDS = {
  executed: ["✓", "executed"], running: ["▶", "in flight"], replayed: ["↺", "replayed"], refused: ["✗", "refused"],
  waits: ["⏸", "told to wait"], stopped: ["■", "stopped"], failed: ["!", "executed, failed"], note: ["•", ""],
};

/** Rows of the trace: one a call, its result beside it; and what operators and agents did between. */
export function rowsOf(entries) {
  const rows = [], byCall = new Map();
  for (const entry of entries) {
    if (entry.op === "after" && byCall.has(`${entry.run} ${entry.call}`)) {
      const row = byCall.get(`${entry.run} ${entry.call}`);
      row.after = entry;
      row.kind = ["progress", "complete"].includes(entry.status) && !entry.verdict ? "executed" : "failed";
      continue;
    }
    const kind = entry.op === "before" ? { execute: "running", replay: "replayed", deny: "refused", wait: "waits", stop: "stopped" }[entry.action] : "note";
    const known = entry.op === "before" && byCall.get(`${entry.run} ${entry.call}`);
    if (known && known.entry.action === entry.action && known.entry.reason === entry.reason) {
      known.times += 1;
      continue;
    }
    const row = { entry, kind, after: null, times: 1 };
    rows.push(row);
    if (entry.op === "before") byCall.set(`${entry.run} ${entry.call}`, row);
  }
  return rows;
}

/** Rows that a refusal names as its evidence: its steps, and itself. */
export function evidenceOf(rows, refusal) {
  const steps = new Set((refusal.entry.steps ?? "").split(",").filter(Boolean));
  return new Set(rows.filter((row) => row === refusal || (row.entry.step && steps.has(row.entry.step) && row.entry.run === refusal.entry.run)));
}

export function timeline(run) {
  const element = h("div");
  let chosen = null, entries = [], isCut = false;

  function draw(newer = entries, cut = isCut) {
    if (newer.length === entries.length && newer !== entries && newer.at(-1)?.id === entries.at(-1)?.id && element.children.length) return;
    [entries, isCut] = [newer, cut];
    const rows = rowsOf(entries), refusals = rows.filter((row) => row.entry.steps);
    const refusal = refusals.find((row) => row.entry.id === chosen) ?? refusals.at(-1);
    const marked = refusal ? evidenceOf(rows, refusal) : new Set();
    const lanes = [...new Set(rows.filter((row) => row.entry.op === "before").map(laneOf))];
    const began = Number(entries[0]?.ms ?? 0);
    fill(element,
      isCut && h("p", { class: "notice" }, "Only the newest part is shown; guardd trace shows all."),
      refusal && h("p", { class: "legend" }, h("span", { class: "mark" }, "marked"), ` the evidence of ${refusal.entry.reason}: steps ${refusal.entry.steps.replaceAll(",", ", ")}, then the refused call`),
      rows.length === 0 ? h("p", { class: "empty" }, "Nothing yet.")
        : h("div", { class: "scroll", role: "region", "aria-label": "Calls by agent", tabindex: "0" }, h("table", { class: "lanes" },
          h("caption", { class: "unseen" }, `Calls of ${run}, a column for each agent`),
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), h("th", { scope: "col" }, "Step"), lanes.map((lane) => h("th", { scope: "col" }, lane)))),
          h("tbody", {}, rows.map((row) => line(row, lanes, began, marked, refusal))))));
  }

  function laneOf({ entry }) {
    const below = entry.run === run ? "" : entry.run.slice(run.length + 1);
    return [entry.agent || "(no agent)", below].filter(Boolean).join(" · ");
  }

  function line(row, lanes, began, marked, refusal) {
    const { entry } = row, isMarked = marked.has(row);
    const time = h("td", { class: "number" }, `+${((Number(entry.ms) - began) / 1000).toFixed(2)} s`);
    const step = h("td", { class: "number" }, entry.step ?? "");
    if (entry.op !== "before") return h("tr", { class: "between" }, time, step, h("td", { colspan: Math.max(1, lanes.length) }, between(entry)));
    const lane = laneOf(row);
    return h("tr", { class: isMarked ? "evidence" : null },
      time, step, lanes.map((each) => h("td", {}, each === lane ? box(row, isMarked, row === refusal) : null)));
  }

  function box(row, isMarked, isRefusal) {
    const { entry, after, kind, times } = row, [sign, word] = KINDS[kind];
    return h("div", { class: `call ${kind}` },
      isMarked && h("span", { class: "mark" }, isRefusal ? "fired here" : "repeated block"), isMarked && " ",
      h("span", { class: "what" }, h("span", { "aria-hidden": "true" }, `${sign} `), `${word} `), h("strong", {}, entry.tool),
      entry.reason && h("span", { class: "reason" }, ` ${entry.reason}`), times > 1 && ` ×${times}`,
      after && h("span", { class: "quiet" }, ` ${after.status}${after.verdict ? ` (${after.verdict})` : ""} ${after.duration_ms} ms${after.claim === "stale" ? ", too late" : ""}`),
      entry.would && h("span", { class: "reason" }, ` would be refused: ${entry.would}`),
      entry.key && h("span", { class: "quiet" }, ` key ${entry.key}`),
      entry.args && entry.args !== "{}" && h("code", { class: "args" }, entry.args.length > ARGS_SHOWN ? `${entry.args.slice(0, ARGS_SHOWN)}…` : entry.args),
      entry.steps && !isRefusal && h("button", { type: "button", class: "small", click: () => { chosen = entry.id; draw(); } }, "show its evidence"));
  }

  return { element, draw };
}

function between(entry) {
  const words = {
    open: `opened with policy ${entry.policy ?? ""}`, handoff: `handoff ${entry.agent ?? ""} → ${entry.to ?? ""}: ${entry.action} ${entry.reason ?? ""}`,
    charge: `model call: ${entry.tokens ?? 0} tokens: ${entry.action} ${entry.reason ?? ""}`, settle: `model call settled: ${entry.tokens ?? 0} tokens`,
    kill: `killed: ${entry.reason}`, freeze: `frozen: ${entry.scope}`, resume: `resumed: ${entry.change}`,
    finish: `finished: ${entry.reason}`, checkpoint: `checkpoint ${entry.ref ?? entry.version}`, withdraw: "an admission was taken back",
    after: `late result of ${entry.tool}: ${entry.status}`,
  };
  return [`${entry.run} `, h("span", {}, words[entry.op] ?? entry.op), entry.note && ` (${entry.note})`];
}
