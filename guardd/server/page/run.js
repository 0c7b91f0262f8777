// One run: what it is, what stopped it, its limits, sub-runs, effects, and what can be done about it.

import { get, Refused } from "/page/api.js";
import { freeze, kill, resolve, resume } from "/page/dialog.js";
import { ago, badge, encodeRun, fill, h, runLink, table, whenNew } from "/page/dom.js";
import { timeline } from "/page/timeline.js";

const TRACE_MAX = 2000;
const SUB_RUNS_MAX = 30;
const BARS = [
  ["Steps", "steps", "max_steps"], ["Rounds without progress", "no_progress", "max_no_progress"],
  ["Model calls", "model_calls", "max_model_calls"], ["Tokens", "tokens", "max_tokens"],
  ["Cost in millionths", "cost_micros", "max_cost_micros"], ["Handoffs", "handoffs", "max_handoffs"],
];

export function runView(main, run) {
  const head = h("div"), side = h("div", { class: "side" }), calls = h("section", { "aria-labelledby": "timeline-title" });
  const lines = timeline(run);
  const show = whenNew((state, below, names) => {
    fill(head, title(state, names));
    fill(side, limits(state), subRuns(state, below, names.length), effects(state), facts(state));
  });
  fill(main, h("p", {}, h("a", { href: "#/runs" }, "← all runs")), head, h("div", { class: "columns" }, calls, side));
  fill(calls, h("h2", { id: "timeline-title" }, "Timeline"), lines.element);

  return {
    async refresh() {
      const state = await get(`/v1/runs/${encodeRun(run)}`);
      const entries = await get(`/v1/trace/${encodeRun(run)}?limit=${TRACE_MAX}&newest=true`);
      const names = [...new Set(entries.map((entry) => entry.run))].filter((name) => name.startsWith(`${run}/`)).sort();
      const below = await Promise.all(names.slice(0, SUB_RUNS_MAX).map(async (name) => {
        try {
          return await get(`/v1/runs/${encodeRun(name)}`);
        } catch (error) {
          if (!(error instanceof Refused)) throw error;
          return { run: name, status: "unknown", reason: error.named, counters: { steps: 0 } };
        }
      }));
      show(state, below, names);
      lines.draw(entries, entries.length === TRACE_MAX);
    },
  };
}

function title(state, subNames) {
  const isOver = state.status === "ended";
  const isHeld = state.status === "waiting" || Boolean(state.freeze);
  return [
    h("h1", {}, state.run, " ", badge(state)),
    state.limits.mode === "observe" && h("p", { class: "banner" }, "Observe mode: refusals are only recorded, every call runs."),
    h("p", { class: "buttons" },
      h("button", { type: "button", id: "kill", class: "danger", disabled: isOver, click: () => kill(state.run, subNames) }, "Kill"),
      h("button", { type: "button", id: "freeze", disabled: isOver, click: () => freeze(state.run, subNames) }, "Freeze"),
      h("button", { type: "button", id: "resume", disabled: !(isOver || isHeld), click: () => resume(state.run, subNames) }, "Resume")),
    why(state),
  ];
}

function why(state) {
  const envelope = state.envelope ?? {};
  const { guard = {}, denied_call: denied = {} } = envelope;
  if (state.status === "running" && !state.freeze) {
    return state.repeats.length > 0 && h("p", { class: "notice" }, "Repeats so far: ",
      state.repeats.map(({ tool, count }) => `${tool} ${count} times`).join(", "));
  }
  if (state.freeze && state.status !== "ended") return h("p", { class: "notice" }, `Held by an operator: ${state.freeze}.`);
  return h("section", { class: "notice", "aria-label": "Why it stopped" },
    h("p", {}, h("strong", {}, state.reason || "human_required"), state.ended_by ? ` (by ${state.ended_by})` : "",
      state.ended_run && state.ended_run !== state.run ? [" of ", runLink(state.ended_run)] : ""),
    guard.rule && h("p", {}, `Rule ${guard.rule}`, guard.observed !== undefined ? `: observed ${guard.observed}` : "",
      guard.limit !== undefined ? `, limit ${guard.limit}` : ""),
    denied.tool && h("p", {}, "Refused call: ", h("code", {}, `${denied.tool} ${denied.args ?? ""}`), denied.agent ? ` by ${denied.agent}` : ""),
    envelope.next_action && h("p", {}, `Next: ${envelope.next_action.replaceAll("_", " ")}`));
}

function limits(state) {
  const bars = BARS.filter(([, , name]) => state.limits[name] !== undefined && state.limits[name] !== null).map(([label, used, name]) => {
    const most = state.limits[name], held = state.counters[`held_${used}`] ?? 0, now = (state.counters[used] ?? 0) + held;
    return h("div", { class: "bar" }, h("label", {}, `${label} `, h("span", { class: "number" }, `${now} of ${most}${held ? ` (${held} held)` : ""}`),
      h("meter", { min: 0, max: Math.max(most, 1), high: most * 0.8, optimum: 0, value: now }, `${now} of ${most}`)));
  });
  return h("section", {}, h("h2", {}, "Limits"), bars.length ? bars : h("p", { class: "empty" }, "No limits."));
}

function subRuns(state, below, count) {
  return h("section", {}, h("h2", {}, "Sub-runs"), below.length === 0 ? h("p", { class: "empty" }, "None.")
    : h("ul", { class: "tree" }, below.map((each) => h("li", { class: `depth-${Math.min(4, each.run.split("/").length - state.run.split("/").length)}` },
      runLink(each.run, each.run.slice(state.run.length + 1)), " ", badge(each), ` ${each.counters.steps} steps ${each.reason}`))),
  count > below.length && h("p", { class: "quiet" }, `and ${count - below.length} more`));
}

function effects(state) {
  return h("section", {}, h("h2", {}, "Effects"), table("Effects", ["Key", "Tool", "State", "Outside"], state.operations.map((each) => [
    each.key, each.tool, stateWord(each.state),
    each.state === "in_doubt" ? settle({ ...each, run: state.run }) : each.operation_id,
  ]), "None with a key."));
}

export const stateWord = (state) => h("span", { class: `badge ${state === "in_doubt" ? "waiting" : state === "committed" ? "done" : "running"}` },
  { in_doubt: "? in doubt", committed: "✓ committed", claimed: "▶ claimed", freed: "free" }[state] ?? state);

export const settle = (effect) => h("button", { type: "button", "aria-label": `Settle ${effect.key} of ${effect.run}`, click: () => resolve(effect) }, "Settle");

function facts(state) {
  const rows = [
    ["Policy", state.policy], ["Started", ago(state.started_ms)], ["Last seen", ago(state.last_ms)],
    ["Labels", Object.entries(state.labels).map(([name, value]) => `${name}=${value}`).join(" ")],
    ["Progress", String(state.progress.version)], ["Checkpoint", state.checkpoint?.ref ?? ""],
    ["In flight", state.in_flight.length ? String(state.in_flight.length) : ""],
    ["Control went", state.handoff_path.join(" → ")], ["Never guarded tools", state.tools.join(", ")],
  ].filter(([, value]) => value);
  return h("section", {}, h("h2", {}, "Facts"), h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}
