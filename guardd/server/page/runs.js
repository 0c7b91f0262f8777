// The list of runs, newest first.

import { get } from "/page/api.js";
import { ago, badge, fill, h, runLink, table } from "/page/dom.js";

const filters = { text: "", state: "", reason: "", label: "" };
const STATES = [["", "any state"], ["running", "running"], ["waiting", "waiting for a person"], ["frozen", "frozen"], ["ended", "ended"]];

export function runsView(main) {
  const list = h("div");
  let runs = [];
  const reasons = h("select", { id: "filter-reason", change: (event) => set("reason", event.target.value) });
  fill(main,
    h("h1", {}, "Runs"),
    h("form", { class: "filters", role: "search", submit: (event) => event.preventDefault() },
      field("filter-text", "Text in the name", h("input", { id: "filter-text", type: "search", value: filters.text, input: (event) => set("text", event.target.value) })),
      field("filter-state", "State", h("select", { id: "filter-state", change: (event) => set("state", event.target.value) },
        STATES.map(([value, text]) => h("option", { value, selected: value === filters.state }, text)))),
      field("filter-reason", "Reason", reasons),
      field("filter-label", "Label, as team=pay", h("input", { id: "filter-label", type: "search", value: filters.label, input: (event) => set("label", event.target.value) }))),
    list);

  function set(name, value) {
    filters[name] = value;
    draw();
  }

  function draw() {
    const known = [...new Set([...runs.map((run) => run.reason).filter(Boolean), filters.reason].filter(Boolean))].sort();
    fill(reasons, h("option", { value: "" }, "any reason"),
      known.map((reason) => h("option", { value: reason, selected: reason === filters.reason }, reason)));
    const shown = runs.filter(fits);
    fill(list,
      h("p", { class: "quiet" }, shown.length === runs.length ? `${runs.length} runs` : `${shown.length} of ${runs.length} runs`),
      table("Runs", ["Run", "State", "Reason", "Steps", "Refused", "Tokens", "Labels", "Policy", "Last seen"], shown.map(row),
        runs.length ? "No run fits these filters." : "No run yet. A run appears here with its first call; try: make demo"));
  }

  return {
    async refresh() {
      runs = await get("/v1/runs?limit=200");
      draw();
    },
  };
}

const field = (id, label, element) => h("div", { class: "field" }, h("label", { for: id }, label), element);

function fits(run) {
  const state = run.freeze && run.status === "running" ? "frozen" : run.status;
  const [name, value] = filters.label.split("=");
  return (!filters.state || state === filters.state)
    && (!filters.reason || run.reason === filters.reason)
    && (!name || (name in run.labels && (value === undefined || run.labels[name].startsWith(value))))
    && JSON.stringify([run.run, run.policy, run.labels]).toLowerCase().includes(filters.text.toLowerCase());
}

function row(run) {
  const { counters } = run;
  return [runLink(run.run), badge(run), run.reason, String(counters.steps), String(counters.denied), String(counters.tokens),
    Object.entries(run.labels).map(([name, value]) => `${name}=${value}`).join(" "), run.policy, ago(run.last_ms)];
}
