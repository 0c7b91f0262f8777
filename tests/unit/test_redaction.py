"""What looks like a secret never reaches the trace; what does not stays readable (SPEC 5)."""

from __future__ import annotations

import random
import re
import string
import time

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
    assert redaction.may_hold_secrets(around.format(secret))
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
    assert redaction.may_hold_secrets(name)
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
    assert redaction.may_hold_secrets(text)
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Token abcdefgh", "Authorization: Token #"),
        ("curl -H 'authorization: bearer abcdefgh' x.test", "curl -H 'authorization: bearer #' x.test"),
        ("Cookie: theme=dark; sid=abcdefgh\nHost: a", "Cookie: #\nHost: a"),
        ('{\\"password\\": \\"hunter22\\"} twice', '{\\"password\\": \\"#\\"} twice'),
        ("curl --password hunter22 x.test", "curl --password # x.test"),
        ("curl -s -u ann:hunter22 x.test", "curl -s -u ann:# x.test"),
        ("https://x.test/cb?access_token=abcdefgh&page=2", "https://x.test/cb?access_token=#&page=2"),
        ("token=abcdefgh", "token=#"),
        ("{'secret' => 'hunter22'}", "{'secret' => '#'}"),
        ('password: str = "hunter22"', 'password: str = "#"'),
        ('{"password": "cut he', '{"password": "#'),
        ("redis://:hunter@22@db/0", "redis://:#@db/0"),
        ("paid with 4111111111111111.", "paid with #."),
        ("4111 1111 1111 1111 123 is card and code", "# 123 is card and code"),
        ("-----BEGIN PGP " + "PRIVATE KEY BLOCK-----\nabcdefgh", "#"),
        ("Basic dTpwd3B3", "Basic #"),
    ],
)
def test_only_the_secret_part_of_a_text_is_replaced(text: str, expected: str) -> None:
    clean = redaction.redact_text(text, key=KEY)
    assert re.sub(r"\[redacted:[0-9a-f]{8}\]", "#", clean) == expected
    assert redaction.redact_text(clean, key=KEY) == clean


@pytest.mark.parametrize(
    "text",
    [
        "page_token=abcdefgh", "the bearer certificates arrived", "Basic authentication is off", "asiapacificnortheast",
        "sk-learn-pipelines-for-everyone", "http://host:8080/a@b", "password=$DB_PASSWORD", "token: ${{ secrets.CI }}",
        "password: null", "1733011200000", "order 4111111111111112", "x = sum(key=len)", "docker run -u 1000:1000 img",
        "-----BEGIN CERTIFICATE-----abc-----END CERTIFICATE-----", "2026-11-30 10:00:00 to 2026-12-01 11:00:00",
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_secret_stays(text: str) -> None:
    assert redaction.redact_text(text, key=KEY) is text


def test_a_secret_has_one_mark_wherever_it_stands() -> None:
    """By name, in a header, in a text: an operator sees that it is the same."""
    mark = redaction.redact({"token": "abcdefgh1"}, key=KEY)["token"]
    for text in ("Authorization: Bearer abcdefgh1", "token=abcdefgh1", '"token": "abcdefgh1"', "x --token abcdefgh1"):
        assert mark in redaction.redact_text(text, key=KEY)


def test_a_value_labelled_secret_and_one_after_a_secret_flag_are_replaced() -> None:
    value = {
        "env": [{"name": "DB_PASSWORD", "value": "hunter22"}, {"name": "HOME", "value": "/srv"}],
        "argv": ["tool", "--api-key", "hunter22", "--verbose", "yes"],
        "card": 4111111111111111, "order": 4111111111111112,
        "Cookie: sid=hunter22": 1,
    }  # fmt: skip
    clean = redaction.redact(value, key=KEY)
    assert "hunter22" not in str(clean)
    assert clean["env"][1] == {"name": "HOME", "value": "/srv"}
    assert clean["argv"][3:] == ["--verbose", "yes"]
    assert clean["card"].startswith("[redacted:")
    assert clean["order"] == 4111111111111112
    assert redaction.redact(clean, key=KEY) == clean


@pytest.mark.parametrize("item", [None, True, False, ""])
def test_what_tells_nothing_stays_under_a_secret_name(item: object) -> None:
    value = {"password": item}
    assert redaction.redact(value, key=KEY) is value


@pytest.mark.parametrize(
    "seed",
    ["a.", "a-", "password=", "password='", "curl -u a:", "://a:", "://a:b@", "-----BEGIN ", "eyJaaaaaaaa-", "SG.a", "sk-",
     "cookie: ", "1 ", "4111-", "\\", 'token="\\"', "bearer a", "a  "],
)  # fmt: skip
def test_the_time_is_linear_in_the_text(seed: str) -> None:
    """Arguments come from a model: none may hold the daemon up. A quadratic pattern takes minutes here."""
    for tail in (" password @", "\n\npassword @"):
        text = (seed * 250_000)[:250_000] + tail
        started_s = time.process_time()
        redaction.redact_text(text, key=KEY)
        assert time.process_time() - started_s < 2


def test_a_cut_keeps_half_a_surrogate_pair_from_failing() -> None:
    """Error messages may hold what is no UTF-8."""
    assert redaction.shorten("\ud800" * 3000)[1]
    assert "\ud800" not in redaction.redact_text("password=\ud800", key=KEY)


@pytest.mark.parametrize("bytes_max", range(12, 20))
def test_a_cut_never_leaves_half_a_character(bytes_max: int) -> None:
    cut, _ = redaction.shorten("é" * 20, bytes_max)
    assert set(cut.removesuffix("…[cut]")) <= {"é"}
    assert bytes_max - 1 <= len(cut.encode()) <= bytes_max
