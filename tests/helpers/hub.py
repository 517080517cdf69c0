"""A model hub on this machine: it speaks the Hugging Face hub's protocol to its real client."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub import constants
from torch import Tensor

from tests.helpers.faults import bad_server

NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@dataclass
class Hub:
    """What the hub has, by "owner/name"; every change of a repository is a commit."""

    home: Path  # HF_HOME
    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # "HEAD /owner/name/…"

    def push(self, name: str, tensors: dict[str, Tensor], **config: Any) -> str:
        """Replace a model's files; return the SHA-256 of its weights."""
        weights = safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()})
        files = {"model.safetensors": weights, "config.json": json.dumps(config).encode()}
        self.repositories[name] = files
        return hashlib.sha256(weights).hexdigest()

    def commit(self, name: str) -> str:
        """Return the commit of what a repository has now."""
        content = b"".join(self.repositories[name].values())
        return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def serve(home: Path) -> Iterator[Hub]:
    """Run a hub; it starts empty."""
    hub = Hub(home)

    class Answer(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(with_body=False)

        def do_GET(self, with_body: bool = True) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            owner, name, resolve, revision, file = self.path.strip("/").split("/", 4)
            files, repository = hub.repositories.get(f"{owner}/{name}"), f"{owner}/{name}"
            known = files is not None and revision in ("main", hub.commit(repository))
            if not known or resolve != "resolve" or files is None or file not in files:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = files[file]
            large = file.endswith(".safetensors")
            digest = hashlib.sha256(content) if large else hashlib.sha1(content)
            self.send_response(200)
            self.send_header("ETag", f'"{digest.hexdigest()}"')
            self.send_header("X-Repo-Commit", hub.commit(repository))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
        server.shutdown()


@contextlib.contextmanager
def serve_files(folder: Path) -> Iterator[str]:
    """Serve the files of a folder by HTTP; yield the address, which ends with a slash."""
    with bad_server.serve(folder) as server:
        yield f"{server.address}/"


def use(monkeypatch: Any, home: Path, address: str = NOWHERE, *, offline: bool = False) -> None:
    """Let the clients, in this process and those it starts, use these caches and this hub.

    huggingface_hub reads its variables when it is imported.
    """
    values = {
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": address,
        "HF_HUB_OFFLINE": str(int(offline)),
        "TORCH_HOME": str(home / "torch"),
        "KSCL_CACHE": str(home / "kscl"),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
