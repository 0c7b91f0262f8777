"""What a client brings: a token and certificates, from the environment and from files, never the command line."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path


def default_token() -> str | None:
    """GUARDD_TOKEN, else what stands in the file that GUARDD_TOKEN_FILE names; None: neither is set.

    Raises: ValueError: the file cannot be read, or others can read it.
    """
    if token := os.environ.get("GUARDD_TOKEN"):
        return token.strip()
    name = os.environ.get("GUARDD_TOKEN_FILE")
    if not name:
        return None
    path = Path(name)
    try:
        with path.open(encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ValueError(f"others can read the token in {path}: chmod 600 {path}")
            return file.read().strip()
    except OSError as error:
        raise ValueError(f"the file of GUARDD_TOKEN_FILE cannot be read: {error}") from error


def tls_context() -> ssl.SSLContext:
    """For tls:// addresses. GUARDD_TLS_CA: the authority of the daemon's certificate (default: the system's);
    GUARDD_CLIENT_CERT and GUARDD_CLIENT_KEY: a certificate of ours, where the daemon asks for one.

    Raises: ValueError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=os.environ.get("GUARDD_TLS_CA") or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate := os.environ.get("GUARDD_CLIENT_CERT"):
            context.load_cert_chain(certificate, os.environ.get("GUARDD_CLIENT_KEY") or None)
    except OSError as error:
        raise ValueError(f"the files of GUARDD_TLS_CA or GUARDD_CLIENT_CERT cannot be used: {error}") from error
    return context
