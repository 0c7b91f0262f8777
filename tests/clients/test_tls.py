"""TLS between client and daemon, and what a client brings: tokens from the environment, certificates."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable
from guardd_client.access import default_token

from tests.certificates import Authority
from tests.daemons import DaemonProcess, daemon
from tests.servers import Server

OPERATORS = ("--operator-socket", "FOLDER/operator.sock")
READY = "unix:FOLDER/operator.sock"


def options(authority: Authority, *more: str, address: str = "tcp://127.0.0.1:0") -> tuple[str, ...]:
    certificate, key = authority.sign("guard.test")
    return (
        *OPERATORS, "--auth", "tokens", "--tls-cert", str(certificate), "--tls-key", str(key), "--listen", address, *more,
    )  # fmt: skip


def address_of(served: DaemonProcess) -> str:
    started = next(event for event in served.log() if event["event"] == "daemon.started")
    return str(next(url for url in started["listen"] if url.startswith("tls://")))


async def token(served: DaemonProcess, **params: Any) -> str:
    async with AsyncGuard(f"unix:{served.folder}/operator.sock") as operator:
        return str((await operator.call("token_new", {"role": "worker", **params}))["token"])


async def test_tls_carries_calls_to_those_who_trust_the_authority(
    embedded: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the authority, with another one, without TLS: no connection, and the tool does not run."""
    authority = Authority.make(tmp_path)
    async with daemon(embedded.url, prefix, *options(authority), ready=READY) as served:
        url, text = address_of(served), await token(served)
        monkeypatch.setenv("GUARDD_TLS_CA", str(authority.path))
        async with AsyncGuard(url, token=text) as guard:
            assert (await guard.run("r").before("t")).action == "execute"
            assert guard.connection.server["role"] == "worker"
        async with AsyncGuard(url) as guard:
            with pytest.raises(GuardRequestError, match="GUARDD_TOKEN"):
                await guard.call("runs", {})
        plain = "tcp://" + url.removeprefix("tls://")
        for other in (plain, url):
            monkeypatch.setenv("GUARDD_TLS_CA", str(Authority.make(tmp_path, "other").path))
            async with AsyncGuard(other, token=text, deadline_ms=400) as guard:
                with pytest.raises(GuardUnavailable):
                    await guard.run("r").before("t")


async def test_a_client_certificate_names_its_caller_in_the_audit(
    embedded: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tls_client_ca nobody without one gets in; a token is needed besides."""
    authority = Authority.make(tmp_path)
    asked = options(authority, "--tls-client-ca", str(authority.path))
    async with daemon(embedded.url, prefix, *asked, ready=READY) as served:
        url, text = address_of(served), await token(served, role="operator", name="ops")
        monkeypatch.setenv("GUARDD_TLS_CA", str(authority.path))
        async with AsyncGuard(url, token=text, deadline_ms=400) as guard:
            with pytest.raises(GuardUnavailable):
                await guard.call("runs", {})
        certificate, key = authority.sign("ada.test")
        monkeypatch.setenv("GUARDD_CLIENT_CERT", str(certificate))
        monkeypatch.setenv("GUARDD_CLIENT_KEY", str(key))
        async with AsyncGuard(url, token=text) as guard:
            await guard.call("kill", {"run": "r"})
            assert "(certificate ada.test)" in (await guard.call("audit", {}))[0]["caller"]
        async with AsyncGuard(url) as guard:
            with pytest.raises(GuardRequestError, match="not_allowed"):
                await guard.call("runs", {})


async def test_beyond_loopback_with_tokens_and_tls(
    embedded: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several workers, too: each makes its own TLS from the same files."""
    authority = Authority.make(tmp_path)
    asked = options(authority, "--workers", "2", address="tls://0.0.0.0:0")
    async with daemon(embedded.url, prefix, *asked, ready=READY) as served:
        started = next(event for event in served.log() if event["event"] == "workers.started")
        assert started["roles"].startswith("tokens: ")
        url = next(url for url in started["listen"] if url.startswith("tls://")).replace("0.0.0.0", "127.0.0.1")
        monkeypatch.setenv("GUARDD_TLS_CA", str(authority.path))
        text = await token(served)
        guards = [AsyncGuard(url, token=text) for _ in range(4)]
        answers = await asyncio.gather(*(guard.run("r").before("t", {"n": n}) for n, guard in enumerate(guards)))
        assert [answer.action for answer in answers] == ["execute"] * 4
        for guard in guards:
            await guard.close()


async def test_a_new_certificate_is_taken_on_sighup(
    embedded: Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.make(tmp_path)
    async with daemon(embedded.url, prefix, *options(authority), ready=READY) as served:
        host, port = address_of(served).removeprefix("tls://").split(":")
        context = ssl.create_default_context(cafile=str(authority.path))

        async def serial() -> Any:
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            found = writer.get_extra_info("peercert")["serialNumber"]
            writer.close()
            return found

        first = await serial()
        authority.sign("guard.test")
        served.process.send_signal(1)
        for _ in range(200):
            if await serial() != first:
                return
            await asyncio.sleep(0.02)
        pytest.fail("the new certificate was not taken")


def test_a_token_comes_from_the_environment_or_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("from-a-file\n")
    path.chmod(0o640)
    monkeypatch.delenv("GUARDD_TOKEN", raising=False)
    assert default_token() is None
    monkeypatch.setenv("GUARDD_TOKEN_FILE", str(path))
    with pytest.raises(ValueError, match="others can read the token.*chmod 600"):
        default_token()
    path.chmod(0o600)
    assert default_token() == "from-a-file"
    monkeypatch.setenv("GUARDD_TOKEN", "from-here")
    assert default_token() == "from-here"
    monkeypatch.delenv("GUARDD_TOKEN")
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        default_token()
