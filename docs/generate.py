"""Fills the generated parts of the docs from the code; `--check` fails when one is stale."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import msgspec

from guardd.model.errors import ERRORS
from guardd.model.limits import LIMITS
from guardd.protocol.operations import COMMON_ERRORS, OPERATIONS
from guardd.server.front import REQUEST_STATUSES, STATUSES
from guardd.server.metrics import METRICS
from guardd.server.settings import Settings

DOCS = Path(__file__).parent


def operations() -> str:
    """A row an operation."""
    rows = ["| method | who | parameters (`?` may be left out) | what for |", "|---|---|---|---|"]
    for operation in OPERATIONS.values():
        shown = ", ".join(
            field.encode_name + ("" if field.required else "?")
            for field in msgspec.structs.fields(operation.params)
            if field.name not in ("at_ms", "epoch")
        )
        rows.append(f"| `{operation.name}` | {operation.role} | {shown} | {operation.text.splitlines()[0]} |")
    rows += [
        "",
        f"| method | answers | errors besides {', '.join(COMMON_ERRORS)} |",
        "|---|---|---|",
    ]
    for operation in OPERATIONS.values():
        rows.append(
            f"| `{operation.name}` | {', '.join(operation.answers) or 'what was asked for'} | {', '.join(operation.errors)} |"
        )
    return "\n".join(rows)


def errors() -> str:
    """A row an error."""
    rows = ["| error | number | retry | meaning |", "|---|---|---|---|"]
    for kind in ERRORS.values():
        rows.append(f"| `{kind.name}` | {kind.number} | {kind.retry} | {(kind.__doc__ or '').splitlines()[0]} |")
    return "\n".join(rows)


def settings() -> str:
    """A row a setting."""
    rows = ["| setting | default | unit | what it is |", "|---|---|---|---|"]
    for each in fields(Settings):
        if each.metadata["help"]:
            rows.append(
                f"| `{each.name}` | `{getattr(Settings(), each.name)!r}` | {each.metadata['unit'].lower()} | {each.metadata['help']} |"
            )
    return "\n".join(rows)


def limits() -> str:
    """A row a limit."""
    rows = ["| limit | `reference` | `agent` | what it caps |", "|---|---|---|---|"]
    for limit in LIMITS.values():
        shown = ["unlimited" if value is None else value for value in (limit.reference, limit.agent)]
        rows.append(f"| `{limit.name}` | {shown[0]} | {shown[1]} | {limit.help} |")
    return "\n".join(rows)


def statuses() -> str:
    """A row a status."""
    by_status: dict[int, list[str]] = {}
    for name, status in STATUSES.items():
        by_status.setdefault(status, []).append(f"`{name}`")
    for status, text in REQUEST_STATUSES.items():
        by_status.setdefault(status, []).append(text)
    rows = ["| status | errors |", "|---|---|"]
    return "\n".join(rows + [f"| {status} | {', '.join(texts)} |" for status, texts in sorted(by_status.items())])


def metrics() -> str:
    """A row a metric."""
    rows = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = f"{metric.kind}, *looked*" if metric.looked else metric.kind
        rows.append(f"| `{metric.name}` | {kind} | {labels} | {metric.text} |")
    return "\n".join(rows)


def filled(text: str) -> str:
    """The page with its generated parts made anew."""
    parts = {
        "operations": operations,
        "errors": errors,
        "settings": settings,
        "limits": limits,
        "statuses": statuses,
        "metrics": metrics,
    }
    return re.sub(
        r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{parts[found[2]]()}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    """Writes, or with --check compares."""
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"stale: {', '.join(stale)}; run make docs")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
