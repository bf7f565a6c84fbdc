"""A stand-in of the Hugging Face hub on this machine, spoken to by the hub's own client; not a test."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_nobody"


class Hub(ThreadingHTTPServer):
    """Keeps what is asked and sent; knows the repositories in ``public`` by whether they are private."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.private: dict[str, bool] = {}
        self.kinds: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        name = self.path.removeprefix("/api/models/").removeprefix("/api/datasets/").partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path.startswith("/api/whoami"):
            self.answer({"name": "org", "type": "user", "auth": {}})
        elif name in self.server.private:
            self.answer({"id": name, "private": self.server.private[name], "siblings": [], "tags": []})
        else:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"org/{asked['name']}"
            self.server.kinds[name] = asked.get("type", "model")
            self.server.private[name] = asked.get("private", asked.get("visibility") == "private")
            self.answer({"url": f"http://127.0.0.1:{self.server.server_port}/{name}"})
        elif "/preupload/" in self.path:
            listed = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self.answer({"files": listed})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"success": True, "commitUrl": f"{self.path}", "commitOid": "0" * 40})
        else:
            self.answer({})

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        about = {"Content-Length": str(len(data)), "Content-Type": "application/json"} | (headers or {})
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass
