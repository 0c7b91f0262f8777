// Questions before anything is changed: a reason, a confirmation that names what it is done to.

import { call, Refused, setToken, token } from "/page/api.js";
import { fill, focusAgain, h, say } from "/page/dom.js";

/**
 * Asks, then does it. Resolves true when it was done, false when the person thought better of it.
 * fields: {name, label, value?, options?, required?, type?}. act(values): throws what the daemon refused.
 */
export function ask({ title, text, fields, verb, isDanger = false, act }) {
  return new Promise((resolve) => {
    const error = h("p", { class: "error", role: "alert" });
    const inputs = fields.map((field) => input(field));
    const go = h("button", { type: "submit", class: isDanger ? "danger" : "primary" }, verb);
    const cancel = h("button", { type: "button", click: () => dialog.close("no") }, "Cancel");
    const form = h("form", { method: "dialog", submit: submit },
      h("h2", { id: "dialog-title" }, title), text.map((line) => line && h("p", {}, line)),
      inputs.map(({ row }) => row), error, h("div", { class: "buttons" }, go, cancel));
    const dialog = h("dialog", { "aria-labelledby": "dialog-title", close: ended }, form);
    const opener = document.activeElement;
    document.body.append(dialog);
    dialog.showModal();
    (inputs[0]?.element ?? go).focus();

    async function submit(event) {
      event.preventDefault();
      go.disabled = true;
      fill(error);
      try {
        await act(Object.fromEntries(inputs.map(({ name, element }) => [name, element.value.trim()])));
        dialog.close("yes");
      } catch (problem) {
        go.disabled = false;
        if (!(problem instanceof Refused)) throw problem;
        error.textContent = problem.toString();
        if (problem.needsToken) {
          error.append(h("br"), h("button", { type: "button", click: askToken }, "Give a token"));
        }
      }
    }

    function ended() {
      dialog.remove();
      focusAgain(opener);
      resolve(dialog.returnValue === "yes");
    }
  });
}

function input({ name, label, value = "", options, required = false, type = "text" }) {
  const id = `field-${name}`;
  const element = options
    ? h("select", { id, name }, options.map(([word, shown]) => h("option", { value: word, selected: word === value }, shown)))
    : h("input", { id, name, type, value, required, autocomplete: "off", maxlength: 500 });
  return { name, element, row: h("div", { class: "field" }, h("label", { for: id }, label), element) };
}

/** Asks for a token and keeps it for this tab. */
export async function askToken() {
  const done = await ask({
    title: "Token",
    text: ["Kept in this tab only. An operator makes one with: guardd token new operator"],
    fields: [{ name: "token", label: "Token (empty: forget it)", value: token(), type: "password" }],
    verb: "Use it",
    act: async (values) => setToken(values.token),
  });
  if (done) {
    say(token() ? "The token is used from now on." : "The token is forgotten.");
    document.dispatchEvent(new Event("guardd-refresh"));
  }
}

const KILL_REASONS = [["incident_stop", "incident_stop"], ["operator_cancelled_loop", "operator_cancelled_loop"], ["killed", "killed"]];
const CHANGES = [
  ["human_input", "a person has decided"], ["limits_raised", "limits were raised"],
  ["authorization_renewed", "access was renewed"], ["arguments_corrected", "arguments were corrected"],
  ["strategy_changed", "the strategy was changed"], ["new_cursor", "there is a new cursor"],
  ["retry_after_elapsed", "the time to wait is over"],
];
const WHY = { name: "note", label: "Why (goes into the audit)", required: true };

const NAMED_MAX = 8;

/** The sub-runs that something is done to as well, by name. */
function named(what, subRuns) {
  if (subRuns.length === 0) return `It and all its sub-runs ${what} (none is known).`;
  const more = subRuns.length - NAMED_MAX;
  return `It and its sub-runs ${what}: ${subRuns.slice(0, NAMED_MAX).join(", ")}${more > 0 ? ` and ${more} more` : ""}.`;
}

/** subRuns: names of those known below it. */
export const kill = (run, subRuns) => ask({
  title: `Kill ${run}?`,
  text: [named("end now", subRuns),
    "A kill cannot be resumed. What a tool already does goes on; what it did is not undone."],
  fields: [WHY, { name: "reason", label: "Reason", value: "incident_stop", options: KILL_REASONS }],
  verb: `Kill ${run}`, isDanger: true,
  act: async (values) => told(`${run} is stopped.`, await call("kill", { run, ...values })),
});

export const freeze = (run, subRuns) => ask({
  title: `Freeze ${run}?`,
  text: [named("wait", subRuns), "Their calls are told to wait until somebody resumes it."],
  fields: [WHY, {
    name: "scope", label: "What waits", value: "all",
    options: [["all", "everything"], ["effects", "effects only"], ["retries", "retries only"], ["handoffs", "handoffs only"], ["subruns", "new sub-runs only"]],
  }],
  verb: `Freeze ${run}`,
  act: async (values) => told(`${run} is frozen.`, await call("freeze", { run, ...values })),
});

export const resume = (run, subRuns) => ask({
  title: `Resume ${run}?`,
  text: [named("may go on", subRuns), "It goes on from where it was. Name what is different now: without a change it would stop again."],
  fields: [WHY, { name: "change", label: "What changed", value: "human_input", options: CHANGES },
    { name: "limits", label: "Higher limits, such as max_steps=120 (several: with spaces)" }],
  verb: `Resume ${run}`,
  act: async ({ limits, ...values }) => told(`${run} goes on.`, await call("resume", {
    run, ...values, ...(limits ? { limits: Object.fromEntries(limits.split(/\s+/).map(limit)) } : {}),
  })),
});

function limit(text) {
  const [name, value] = text.split("=");
  return [name, /^\d+$/.test(value ?? "") ? Number(value) : value ?? ""];
}

/** effect: {run, tool, key, scope}. */
export const resolve = (effect) => ask({
  title: `What is true of ${effect.key}?`,
  text: [`${effect.tool} in ${effect.run}. Look in the outside system first.`,
    "Happened: nobody runs it again. Did not happen: the next call may run it."],
  fields: [
    { name: "state", label: "In the outside system it", value: "", options: [["", "choose"], ["committed", "happened"], ["not_executed", "did not happen"]] },
    { name: "operation_id", label: "Its name there, if it happened (transaction, ticket)" }, WHY],
  verb: "Settle it",
  act: async ({ state, operation_id: operationId, note }) => {
    if (!state) throw new Refused(0, { error: "nothing chosen", message: "say whether it happened or not" });
    told(`${effect.key} is settled: ${state}.`, await call("resolve", {
      run: effect.run, tool: effect.tool, idempotency_key: effect.key, scope: effect.scope, state, note,
      ...(operationId ? { operation_id: operationId } : {}),
    }));
  },
});

export const deny = () => ask({
  title: "Forbid a tool in every run",
  text: ["Within a second, on every daemon."],
  fields: [
    WHY,
    { name: "id", label: "Name of the rule, such as inc-1", required: true },
    { name: "tool", label: "Tool, or a pattern such as payments.*", required: true },
    { name: "run_prefix", label: "Only runs that begin with (empty: all)" },
    { name: "minutes", label: "For how many minutes (empty: until removed)", type: "number" },
  ],
  verb: "Forbid it", isDanger: true,
  act: async ({ id, tool, run_prefix: prefix, minutes, note }) => told(`${tool} is forbidden.`, await call("deny_rule", {
    id, tool, note, ...(prefix ? { run_prefix: prefix } : {}), ...(minutes ? { until_ms: Date.now() + minutes * 60_000 } : {}),
  })),
});

export const allow = (rule) => ask({
  title: `Remove ${rule.id}?`, text: [`${rule.tool} may run again, in every run, within a second.`, rule.note && `It was forbidden because: ${rule.note}`], fields: [WHY],
  verb: "Remove it", act: async ({ note }) => told(`${rule.id} is removed.`, await call("deny_rule", { id: rule.id, remove: true, note })),
});

function told(text, answer) {
  say(text);
  return answer;
}
