"""What looks like a secret never reaches the trace; what does not stays readable (SPEC 5)."""

from __future__ import annotations

import random
import string

import pytest

from guardd import redaction

KEY = b"key of this installation"
RANDOM = random.Random(7)


def noise(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(RANDOM.choice(alphabet) for _ in range(length))


# Made here, so that no scanner takes this file for a leak.
SECRETS = [
    "Bearer " + noise(40), "Basic " + noise(24) + "==", "sk-" + noise(40), "sk-proj-" + noise(40), "sk-ant-api03-" + noise(40),
    "sk_live_" + noise(24), "ghp_" + noise(36), "github_pat_" + noise(60), "glpat-" + noise(20), "xoxb-" + noise(30),
    "AKIA" + noise(16, string.ascii_uppercase + string.digits), "AIza" + noise(35), "hf_" + noise(34), "npm_" + noise(36),
    "SG." + noise(22) + "." + noise(43), "eyJ" + noise(20) + "." + noise(30) + "." + noise(30),
    "-----BEGIN RSA " + "PRIVATE KEY-----\n" + noise(64) + "\n-----END RSA " + "PRIVATE KEY-----",
    "4111 1111 1111 1111", "5500-0000-0000-0004", "378282246310005",
]  # fmt: skip
HARMLESS = [
    "the quick brown fox", "refund order 4111", "2026-12-01T10:00:00Z", "https://example.test/a?page=2", "skipping-the-test-file-now",
    "1234567890123456", "task-sk", "deploy bearer of news", "pass the salt", "a:b=c", "tokens: 500", "0000000000000000",
    "/usr/share/doc/readme.md", "f3b1c2d4e5", "key results of the quarter", "550e8400-e29b-41d4-a716-446655440000",
]  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("around", ["{}", "curl -H 'X: {}' example.test", "before {} after"])
def test_a_secret_inside_any_text_is_replaced(secret: str, around: str) -> None:
    clean = redaction.redact({"cmd": around.format(secret)}, key=KEY)["cmd"]
    assert secret not in clean
    assert secret[8:20] not in clean
    assert "[redacted:" in clean


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    value = {"q": text, "n": [1, text]}
    assert redaction.redact(value, key=KEY) is value


@pytest.mark.parametrize(
    "name",
    ["password", "db_password", "dbPassword", "X-Api-Key", "apiKey", "api_key", "access_token", "token", "Authorization",
     "client_secret", "set-cookie", "private_key", "aws_secret_access_key", "passphrase", "credentials", "otp"],
)  # fmt: skip
def test_a_member_of_a_secret_name_is_replaced_whatever_it_holds(name: str) -> None:
    clean = redaction.redact({"user": "ann", "deep": [{name: "hunter2"}], name: {"a": 1}}, key=KEY)
    assert "hunter2" not in str(clean)
    assert clean["user"] == "ann"
    assert clean[name].startswith("[redacted:")


@pytest.mark.parametrize(
    "name", ["max_tokens", "token_count", "next_page_token", "pageToken", "passenger", "author", "keyboard", "compass"]
)
def test_a_member_of_a_harmless_name_stays(name: str) -> None:
    value = {name: "abc"}
    assert redaction.redact(value, key=KEY) is value


@pytest.mark.parametrize(
    "text",
    [
        "mysql --password=hunter22 -u root",
        'config {"api_key": "hunter22"}',
        "SECRET_KEY = hunter22",
        "postgres://ann:hunter22@db/x",
    ],
)
def test_assigned_and_url_passwords_are_replaced(text: str) -> None:
    assert "hunter22" not in redaction.redact_text(text, key=KEY)


def test_the_same_secret_has_the_same_mark_under_one_key_only() -> None:
    one = redaction.redact({"token": "a"}, key=KEY)
    assert one == redaction.redact({"token": "a"}, key=KEY)
    assert one != redaction.redact({"token": "a"}, key=b"another")
    assert one != redaction.redact({"token": "b"}, key=KEY)


def test_names_of_a_tool_rule_are_secret_too() -> None:
    assert redaction.redact({"iban": "DE1"}, key=KEY, names=frozenset({"iban"}))["iban"].startswith("[redacted:")


def test_text_is_cut_between_characters_and_marked() -> None:
    cut, was_cut = redaction.shorten("é" * 2000)
    assert was_cut
    assert len(cut.encode()) <= redaction.TRACE_ARGS_BYTES_MAX
    assert cut.endswith("[cut]")
    assert redaction.shorten("é" * 100) == ("é" * 100, False)
