"""Models by their hub id, from a small server that speaks the hub's protocol."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moejax.errors import UserError
from moejax.models.hub import is_hub_id, model_directory
from moejax.start.options import Config
from tests.conftest import DEMO, REPOSITORY

COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """One repository, org/demo, with the files of a checkpoint; org/gated must be asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked, self.broken = files, [], 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("size", str(len(body))))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path))
        if "gated" in path:
            return self.answer(401, X_Error_Code="GatedRepo", X_Error_Message="ask")
        if "org/demo" not in path:
            return self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Not found")
        if "nowhere" in path:
            return self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="none")
        files = self.server.files
        if path.startswith("/api/models/org/demo/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": _oid(body)}
                for name, body in files.items()
            ]
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        if path.startswith("/api/models/org/demo"):
            siblings = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
            about = {"id": "org/demo", "modelId": "org/demo", "sha": COMMIT, "siblings": siblings}
            return self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
        body = files.get(path.partition("/resolve/")[2].partition("/")[2])
        if body is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        about = {"ETag": f'"{_oid(body)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        if self.server.broken and self.command == "GET" and path.endswith(".safetensors"):
            self.server.broken -= 1
            self.answer(200, body[: len(body) // 2], size=str(len(body)), **about)
            self.connection.close()
            return None
        if start:
            about["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return self.answer(206 if start else 200, body[start:], **about)


def _oid(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


@pytest.fixture
def hub():
    files = {file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()}
    files |= {"pytorch_model.bin": b"twice", "demo.gguf": b"thrice"}
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(
    hub: Hub,
    home: Path,
    name: str,
    what: str = "all",
    *,
    free: int | None = None,
    offline: bool = False,
) -> str:
    """The directory, or why there is none. free: bytes of the disk."""
    from huggingface_hub import constants

    url, usage = f"http://127.0.0.1:{hub.server_port}", shutil.disk_usage("/")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        if free is not None:
            patch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=free))
        try:
            found = model_directory(name, config_only=what == "config")
        except UserError as error:
            return f"refused: {error}"
    return str(found).removesuffix("/config.json")


def test_a_model_is_downloaded_once_and_then_needs_no_network(hub, tmp_path):
    found = Path(fetch(hub, tmp_path, "org/demo"))
    assert found.name == COMMIT
    assert (found / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not {"pytorch_model.bin", "demo.gguf"} & {file.name for file in found.iterdir()}
    hub.asked.clear()
    assert Path(fetch(hub, tmp_path, "org/demo", offline=True)) == found
    assert Path(fetch(hub, tmp_path, "org/demo")) == found
    assert not hub.asked


@pytest.mark.slow
def test_from_a_hub_id_to_a_text(hub, tmp_path):
    """README's example of a model from the hub, from an empty cache."""
    (line,) = re.findall(r"^moejax (.*--model .*)$", (REPOSITORY / "README.md").read_text(), re.M)
    asked = shlex.split(line)
    at = asked.index("--model") + 1
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
    }
    texts = []
    for model in ("org/demo", "org/demo", str(DEMO)):
        asked[at] = model
        done = subprocess.run(
            [sys.executable, "-m", "moejax", *asked, "--max-tokens", "8", "--temperature", "0"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
        environment["HF_HUB_OFFLINE"] = "1"
    assert texts[0].strip() and len({*texts}) == 1


def test_info_reads_the_config_alone(hub, tmp_path):
    found = Path(fetch(hub, tmp_path, "org/demo@v1", "config"))
    assert (found / "config.json").is_file() and not (found / "model.safetensors").exists()
    assert not [path for _, path in hub.asked if path.endswith(".safetensors")]
    assert Path(fetch(hub, tmp_path, "org/demo@v1")) == found
    assert (found / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_broken_connection_goes_on_with_the_next_try(hub, tmp_path):
    hub.broken = 100
    ended = fetch(hub, tmp_path, "org/demo")
    assert ended.startswith("refused: org/demo: ") and "goes on with it" in ended
    hub.broken = 0
    found = Path(fetch(hub, tmp_path, "org/demo"))
    assert (found / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_no_network_is_said(hub, tmp_path):
    hub.shutdown()
    hub.server_close()  # nobody listens any more
    assert "the hub cannot be reached" in fetch(hub, tmp_path, "org/demo")


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("org/none", {}, "there is none of this name"),
        ("org/gated", {}, "accept their terms"),
        ("org/demo@nowhere", {}, "it has no such revision"),
        ("org/demo", {"offline": True}, "not all of it is in the hub's cache"),
        ("org/demo", {"free": 1000}, "make room, or set HF_HUB_CACHE to another place"),
    ],
)
def test_what_cannot_be_had_is_said(hub, tmp_path, name, state, message):
    found = fetch(hub, tmp_path, name, **state)
    assert found.startswith(f"refused: {name}: ") and message in found


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "no model.safetensors"),
        ({"model.safetensors": b""}, "no config.json"),
    ],
)
def test_what_is_no_model_is_refused_before_a_download(hub, tmp_path, files, message):
    hub.files = files
    assert message in fetch(hub, tmp_path, "org/demo")


GGUF = [
    "demo-Q4_K_M.gguf",
    "demo-Q8_0.gguf",
    *(f"UD-Q6_K/demo-UD-Q6_K-0000{part}-of-00002.gguf" for part in (1, 2)),
    "mmproj-Q8_0.gguf",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "found"),
    [
        ("q8_0", [1]),
        ("demo-Q4_K_M.gguf", [0]),
        ("UD-Q6_K", [2, 3]),
        ("Q6_K", [2, 3]),
    ],
)
def test_gguf_files_are_downloaded_once(hub, tmp_path, which, found):
    hub.files = {name: name.encode() for name in GGUF}
    path = Path(fetch(hub, tmp_path, f"org/demo@main:{which}"))
    assert str(path).endswith(GGUF[found[0]]) and path.read_text() == GGUF[found[0]]
    (snapshot,) = tmp_path.glob("hub/*/snapshots/*")
    there = [each for each in snapshot.rglob("*.gguf") if each.is_file()]
    assert sorted(each.relative_to(snapshot).as_posix() for each in there) == sorted(
        GGUF[i] for i in found
    )
    hub.asked.clear()
    assert Path(fetch(hub, tmp_path, f"org/demo@main:{which}", offline=True)) == path
    assert Path(fetch(hub, tmp_path, f"org/demo@main:{which}", "config")) == path
    assert not hub.asked


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("org/demo:Q4_K", "all", "no GGUF files of the hub's model are Q4_K; name one: org/demo:U"),
        (
            "org/demo:other.gguf",
            "all",
            "gguf, org/demo:demo-Q4_K_M.gguf, org/demo:demo-Q8_0.gguf",
        ),
        (
            "org/demo",
            "all",
            "no config.json at its top; name one of its GGUF files, as in org/demo:",
        ),
        ("org/demo:Q8_0", "config", "not in the hub's cache"),
        ("org/none:Q8_0", "all", "there is none of this name"),
    ],
)
def test_which_gguf_file_is_meant_is_asked(hub, tmp_path, name, what, message):
    hub.files = dict.fromkeys(GGUF, b"")
    assert message in fetch(hub, tmp_path, name, what)


def test_ids_and_paths(tmp_path, monkeypatch):
    with contextlib.chdir(tmp_path):
        for name in ("org/demo", "org/demo@refs/pr/1", "org/demo:Q8_0", "org/demo@v1:a/b.gguf"):
            assert is_hub_id(name)
        for path in ("demo", "/org/demo", "./org/demo", "a/b/c", "org/demo@", Path("org/demo")):
            assert not is_hub_id(path)
        assert Config.of("org/demo:Q8_0", revision="v1").model.model == "org/demo@v1:Q8_0"
        for model in ("demo", "org/demo@v2"):
            with pytest.raises(UserError, match="'v1' is a branch, tag or commit of a model of"):
                Config.of(model, revision="v1")
        (tmp_path / "org" / "demo").mkdir(parents=True)
        assert not is_hub_id("org/demo")
