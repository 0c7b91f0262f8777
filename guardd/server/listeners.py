"""Addresses: which may be served, their sockets, TLS, and who a caller without a token is on each."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from guardd.model.errors import BadArgument
from guardd.protocol.operations import Role
from guardd.server.access import Door
from guardd.server.settings import Settings

log = structlog.get_logger()

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DESCRIPTORS_BESIDES = 64
"""What a daemon opens besides its connections: store, files, listeners."""


@dataclass(frozen=True)
class Listener:
    """A socket that listens, for frames or for HTTP. shown: its address as clients name it. path: of a Unix socket."""

    socket: socket.socket
    door: Door
    shown: str
    path: Path | None
    speaks: Literal["rpc", "http"] = "rpc"
    is_ours: bool = True
    """False: the parent of several workers bound it, and removes it."""

    def unlink(self) -> None:
        """Removes the file of a Unix socket that this process bound."""
        if self.is_ours and self.path is not None:
            self.path.unlink(missing_ok=True)


def check_addresses(settings: Settings) -> None:
    """Nothing but loopback is served without tokens and TLS (SPEC 5).

    Raises: BadArgument: with the sentence that mends it.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key) or (settings.tls_client_ca and not settings.tls_cert):
        raise BadArgument(
            "TLS needs a certificate and its key: set tls_cert and tls_key", field="tls_cert", value=settings.tls_cert,
            limit="both files",
        )  # fmt: skip
    for field, address in (*_named("listen", settings.listen), *_named("http_listen", settings.http_listen)):
        if address.startswith("unix:"):
            continue
        host, _ = _host_and_port(address, field)
        if address.startswith("tls://") and not settings.tls_cert:
            raise BadArgument(
                "this address asks for TLS: set tls_cert and tls_key", field=field, value=address, limit="tcp://"
            )
        if host not in LOOPBACK and not (settings.auth == "tokens" and settings.tls_cert):
            raise BadArgument(
                "beyond loopback only callers with tokens are served, over TLS: add --auth tokens --tls-cert FILE "
                "--tls-key FILE, or listen on 127.0.0.1 or a Unix socket",
                field=field, value=address, limit="loopback, or tokens and TLS",
            )  # fmt: skip


def open_listeners(settings: Settings) -> list[Listener]:
    """What this process listens on: sockets that the parent of several workers has bound, else its own.

    Raises: BadArgument: see bind_listeners.
    """
    if inherited := os.environ.get("GUARDD_LISTEN_FDS"):
        sockets = [socket.socket(fileno=int(each)) for each in inherited.split(",")]
        return _with_doors(sockets, settings, is_ours=False)
    return bind_listeners(settings)


def bind_listeners(settings: Settings) -> list[Listener]:
    """A listening socket an address: `listen`, the operators', then HTTP.

    Raises: BadArgument: an address that is none, is open to others, or is served by another daemon.
    """
    check_addresses(settings)
    sockets = [_bind(address) for address in settings.listen]
    if settings.operator_socket:
        sockets.append(_bind(f"unix:{settings.operator_socket.removeprefix('unix:')}"))
    sockets += [_bind(address) for address in settings.http_listen]
    for each in sockets:
        each.listen(1024)
        each.setblocking(False)
    return _with_doors(sockets, settings, is_ours=True)


def _with_doors(sockets: list[socket.socket], settings: Settings, *, is_ours: bool) -> list[Listener]:
    role: Role | None = None if settings.auth == "tokens" else "worker" if settings.operator_socket else "operator"
    # Any web page can reach loopback: over TCP nobody is operator for being there (SPEC 4).
    http_role: Role | None = None if settings.auth == "tokens" else "worker"
    addresses = [(address, "rpc") for address in settings.listen]
    addresses += [("", "rpc")] * bool(settings.operator_socket) + [
        (address, "http") for address in settings.http_listen
    ]
    scheme = {"rpc": "tls" if settings.tls_cert else "tcp", "http": "https" if settings.tls_cert else "http"}
    listeners = []
    for each, (address, speaks) in zip(sockets, addresses, strict=True):
        is_unix, name = each.family == socket.AF_UNIX, each.getsockname()
        if not address:
            door = Door("operator socket", "operator", takes_token=False)
        elif speaks == "http":
            door = Door("http unix socket", role) if is_unix else Door("http", http_role)
        else:
            door = Door("unix socket" if is_unix else "tcp", role)
        if is_unix:
            shown = f"unix:{name}"
        else:
            host = _host_and_port(address)[0]
            shown = f"{scheme[speaks]}://{f'[{host}]' if ':' in host else host}:{name[1]}"
        path = Path(name) if is_unix else None
        listeners.append(Listener(each, door, shown, path, "http" if speaks == "http" else "rpc", is_ours))
    return listeners


def _named(field: str, addresses: list[str]) -> list[tuple[str, str]]:
    return [(field, address) for address in addresses]


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


def _host_and_port(address: str, field: str = "listen") -> tuple[str, int]:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if scheme not in ("tcp", "tls") or not host or not port.isdigit():
        raise BadArgument(
            "no address to listen on", field=field, value=address,
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
