"""Addresses: which may be served, their sockets, TLS, and who a caller without a token is on each."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from guardd.model.errors import BadArgument
from guardd.server.access import Door
from guardd.server.settings import Settings

log = structlog.get_logger()

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DESCRIPTORS_BESIDES = 64
"""What a daemon opens besides its connections: store, files, listeners."""


@dataclass(frozen=True)
class Listener:
    """A socket that listens. shown: its address as clients name it. path: of a Unix socket."""

    socket: socket.socket
    door: Door
    shown: str
    path: Path | None


def check_addresses(settings: Settings) -> None:
    """Nothing but loopback is served without tokens and TLS (SPEC 5).

    Raises: BadArgument: with the sentence that mends it.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key) or (settings.tls_client_ca and not settings.tls_cert):
        raise BadArgument(
            "TLS needs a certificate and its key: set tls_cert and tls_key", field="tls_cert", value=settings.tls_cert,
            limit="both files",
        )  # fmt: skip
    for address in settings.listen:
        if address.startswith("unix:"):
            continue
        host, _ = _host_and_port(address)
        if address.startswith("tls://") and not settings.tls_cert:
            raise BadArgument(
                "this address asks for TLS: set tls_cert and tls_key", field="listen", value=address, limit="tcp://"
            )
        if host not in LOOPBACK and not (settings.auth == "tokens" and settings.tls_cert):
            raise BadArgument(
                "beyond loopback only callers with tokens are served, over TLS: add --auth tokens --tls-cert FILE "
                "--tls-key FILE, or listen on 127.0.0.1 or a Unix socket",
                field="listen", value=address, limit="loopback, or tokens and TLS",
            )  # fmt: skip


def bind_listeners(settings: Settings) -> list[Listener]:
    """A listening socket an address; the operators' last.

    Raises: BadArgument: an address that is none, is open to others, or is served by another daemon.
    """
    check_addresses(settings)
    sockets = [_bind(address) for address in settings.listen]
    if settings.operator_socket:
        sockets.append(_bind(f"unix:{settings.operator_socket.removeprefix('unix:')}"))
    for each in sockets:
        each.listen(1024)
        each.setblocking(False)
    return _with_doors(sockets, settings)


def inherited_listeners(descriptors: str, settings: Settings) -> list[Listener]:
    """The sockets that the parent of several workers has bound, in the same order."""
    return _with_doors([socket.socket(fileno=int(each)) for each in descriptors.split(",")], settings)


def _with_doors(sockets: list[socket.socket], settings: Settings) -> list[Listener]:
    listeners = []
    role: Any = None if settings.auth == "tokens" else "worker" if settings.operator_socket else "operator"
    for number, each in enumerate(sockets):
        if number == len(settings.listen):
            door = Door("operator socket", "operator", takes_token=False)
        else:
            door = Door("unix socket" if each.family == socket.AF_UNIX else "tcp", role)
        name = each.getsockname()
        if each.family == socket.AF_UNIX:
            shown = f"unix:{name}"
        else:
            host = _host_and_port(settings.listen[number])[0]
            shown = f"{'tls' if settings.tls_cert else 'tcp'}://{f'[{host}]' if ':' in host else host}:{name[1]}"
        listeners.append(Listener(each, door, shown, Path(name) if each.family == socket.AF_UNIX else None))
    return listeners


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What TCP listeners speak; None: no TLS.

    Raises: BadArgument: a file is missing or is none.
    """
    if not settings.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificates(context, settings)
    return context


def load_certificates(context: ssl.SSLContext, settings: Settings) -> None:
    """Certificates for connections from now on; asked again at a reload.

    Raises: BadArgument: a file is missing or is none.
    """
    try:
        if Path(settings.tls_key).stat().st_mode & 0o007:
            log.warning("tls_key.readable", mend=f"chmod o= {settings.tls_key}")
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise BadArgument(
            f"the files for TLS cannot be used: {error}", field="tls_cert", value=settings.tls_cert, limit="PEM files"
        ) from error


def peer_name(certificate: Any) -> str:
    """What a client's certificate is called: the first of its other names, else its common name."""
    if not certificate:
        return ""
    names = [value for _, value in certificate.get("subjectAltName", ())]
    names += [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return f"certificate {names[0]}" if names else "certificate"


def raise_descriptor_limit(connections_max: int) -> None:
    """As many descriptors as the connections need, as far as the system lets us; says so when it does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + DESCRIPTORS_BESIDES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            log.warning("descriptors.few", limit=most, wanted=wanted)


def _bind(address: str) -> socket.socket:
    if not address.startswith("unix:"):
        host, port = _host_and_port(address)
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    path = Path(address.removeprefix("unix:").removeprefix("//")).absolute()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if stat.S_IMODE(status.st_mode) & 0o022 or status.st_uid not in (0, os.geteuid()):
        raise BadArgument(
            f"others could put a socket of theirs there: chmod go-w {path.parent}, or name a directory of your own",
            field="listen", value=str(path), limit="a directory that only its owner can write",
        )  # fmt: skip
    _end_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(previous)
    return listener


def _host_and_port(address: str) -> tuple[str, int]:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if scheme not in ("tcp", "tls") or not host or not port.isdigit():
        raise BadArgument(
            "no address to listen on", field="listen", value=address,
            limit="unix:PATH, tcp://HOST:PORT or tls://HOST:PORT",
        )  # fmt: skip
    return host, int(port)


def _end_stale_socket(path: Path) -> None:
    """Removes a socket nobody listens on.

    Raises: BadArgument: a daemon answers there.
    """
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise BadArgument(
        "another daemon listens there: stop it, or name another socket", field="listen", value=str(path), limit="free"
    )
