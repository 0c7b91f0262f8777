// What the page asks of the daemon. It holds no rule: what is refused, the daemon refused.

const KEPT = "guardd-token";

/** A request that was refused or not answered. named: the error as the daemon names it. */
export class Refused extends Error {
  constructor(status, body) {
    super(body.message ?? `the daemon answered ${status}`);
    this.status = status;
    this.named = body.error ?? "";
    this.details = ["field", "value", "limit"].filter((name) => body[name] !== undefined && body[name] !== null)
      .map((name) => `${name}: ${body[name]}`).join(", ");
  }

  get needsToken() {
    return this.status === 401 || this.status === 403;
  }

  toString() {
    return [this.named, this.message, this.details].filter(Boolean).join(" · ");
  }
}

export const token = () => sessionStorage.getItem(KEPT) ?? "";

/** Kept for this tab only. "": none. */
export function setToken(text) {
  if (text) sessionStorage.setItem(KEPT, text);
  else sessionStorage.removeItem(KEPT);
}

function headers(more = {}) {
  return token() ? { ...more, Authorization: `Bearer ${token()}` } : more;
}

async function answered(response) {
  const text = await response.text();
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    body = { message: text.slice(0, 200) };
  }
  if (!response.ok) throw new Refused(response.status, body);
  return body;
}

async function sent(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Refused(0, { error: "unreachable", message: "the daemon does not answer; is it running?" });
  }
  return answered(response);
}

export const get = (path) => sent(path, { headers: headers() });

export const call = (method, params) => sent(`/v1/${method}`, {
  method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(params),
});

/** Null: ready. Else the sentence that says why nothing is granted. */
export async function trouble() {
  try {
    await get("/readyz");
    return null;
  } catch (error) {
    return error.toString();
  }
}

/**
 * Follows /v1/events until the signal aborts or nobody may listen; connects again after a break. EventSource cannot send a token.
 * heard(event): one event. changed(isLive): whether it is connected.
 */
export async function follow(signal, heard, changed) {
  while (!signal.aborted) {
    try {
      const response = await fetch("/v1/events", { headers: headers(), signal });
      if (response.status === 401 || response.status === 403) {
        changed(false);
        return; // again with a token, not before
      }
      if (!response.ok) throw new Error(String(response.status));
      changed(true);
      await read(response.body, heard);
    } catch {
      // The state says it: not connected. The next turn tries again.
    }
    changed(false);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function read(body, heard) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line) heard(JSON.parse(line.slice(6)));
    }
  }
}
