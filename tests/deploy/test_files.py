"""The files of deploy/: checked by the linters made for them, and by starting what they start."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import compose_spec
import pytest
import yaml
from guardd_client import AsyncGuard

from guardd.server.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
UNIT = (DEPLOY / "guardd.service").read_text(encoding="utf-8")
EXPOSURE_MAX = 2.0


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    found = subprocess.run([str(linter), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_gets_all_it_needs(tmp_path: Path) -> None:
    """A wheel built of nothing but what the Dockerfile copies holds the scripts and the page."""
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / "src" / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (tmp_path / "src").mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / "src" / source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path / "out"), "."]
    subprocess.run(command, cwd=tmp_path / "src", check=True)
    (wheel,) = (tmp_path / "out").glob("guardd-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"guardd/_lua/before.lua", "guardd/_lua/include/ledger.lua", "guardd/server/page/app.js"} <= names


def test_the_compose_file_is_one() -> None:
    """By the Compose Specification; and it says what guardd asks of a server."""
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    compose_spec.PyCompose.from_yaml(text).validate()
    services = yaml.safe_load(text)["services"]
    command = " ".join(services["valkey"]["command"])
    assert "--appendonly yes --appendfsync always --maxmemory-policy noeviction" in command
    load_settings({}, services["guardd"]["environment"])


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("CI") != "true",
    reason="no systemd-analyze on PATH: apt-get install systemd",
)
def test_the_unit_is_right_and_closed(tmp_path: Path) -> None:
    unit = tmp_path / "guardd.service"
    unit.write_text(UNIT.replace("/opt/guardd/bin/guardd", sys.executable), encoding="utf-8")
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in checked.stderr.splitlines() if "guardd" in line] == []
    rated = subprocess.run(["systemd-analyze", "security", "--offline=yes", str(unit)], capture_output=True, text=True, check=False)  # fmt: skip
    (exposure,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", rated.stdout)
    assert float(exposure) <= EXPOSURE_MAX, rated.stdout


async def test_what_the_unit_starts_serves_with_tokens() -> None:
    """Its command and its environment, in folders of this test; a worker needs a token, the socket's caller is operator."""
    with tempfile.TemporaryDirectory(prefix="gd-") as name:
        folder = Path(name)
        (folder / "guardd").mkdir(mode=0o700)
        given = dict(each.split("=", 1) for each in re.findall(r"^Environment=(.+)$", UNIT, flags=re.MULTILINE))
        env = {
            key: value.replace("%S", name).replace("%t", name).replace(":7070", ":0") for key, value in given.items()
        }
        (command,) = re.findall(r"^ExecStart=(.+)$", UNIT, flags=re.MULTILINE)
        words = [sys.executable, "-m", "guardd.cli.main", *shlex.split(command)[1:]]
        log = folder / "log"
        with log.open("wb") as to:
            process = subprocess.Popen(words, env={**os.environ, **env}, stderr=to, cwd=folder / "guardd")
        try:
            operator = f"unix:{env['GUARDD_OPERATOR_SOCKET']}"
            async with AsyncGuard(operator, deadline_ms=30_000) as guard:
                token = (await guard.call("token_new", {"role": "worker"}))["token"]
            (port,) = re.findall(r"tcp://127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8"))[:1]
            async with AsyncGuard(f"tcp://127.0.0.1:{port}", token=token) as guard:
                assert (await guard.run("r", agent="a").before("look", {})).action == "execute"
        finally:
            process.terminate()
            process.wait()
