"""Lets wandb upload an offline run to a server of this program's: `check_wandb.py RUN_DIR`, after `cox report --wandb`.

What arrives must be the run: its whole run file as the config, the loss of every step, the same tags in history and
summary, without a word of warning from wandb. Nothing leaves the machine. Exit code 77 where wandb is missing.
"""

import gzip
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

try:
    import wandb
except ImportError as missing:
    print(f"skipped: {missing}; pip install wandb")
    sys.exit(77)

BUCKET = {
    "upsertBucket": {
        "bucket": {
            "id": "1",
            "name": "run",
            "displayName": "run",
            "project": {"id": "1", "name": "coxswain", "entity": {"id": "1", "name": "nobody"}},
            "historyLineCount": 0,
        },
        "inserted": True,
    }
}


class Arrived:
    """What wandb has sent."""

    def __init__(self):
        self.lock, self.config, self.summary, self.history, self.exit_code = threading.Lock(), {}, {}, {}, None

    def graphql(self, asked):
        if "upsertBucket" not in asked["query"]:
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}}
        config = json.loads(asked["variables"].get("config") or "{}")
        with self.lock:
            self.config |= {key: value["value"] for key, value in config.items()}
        return BUCKET

    def stream(self, sent):
        with self.lock:
            self.exit_code = sent.get("exitcode", self.exit_code)
            for name, part in (sent.get("files") or {}).items():
                for line in map(json.loads, part["content"]):
                    if name == "wandb-history.jsonl":
                        self.history.setdefault(line["_step"], {}).update(line)
                    elif name == "wandb-summary.json":
                        self.summary = line


def serve(arrived):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer = {}
            if self.path == "/graphql":
                answer = {"data": arrived.graphql(json.loads(body))}
            elif self.path.endswith("/file_stream"):
                arrived.stream(json.loads(body))
            answer = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def without_empty(value):
    """wandb sends no mapping that has nothing in it."""
    if not isinstance(value, dict):
        return value
    return {key: without_empty(inner) for key, inner in value.items() if inner != {}}


def main():
    run = pathlib.Path(sys.argv[1])
    offline = sorted((run / "wandb").glob("offline-run-*"))
    assert len(offline) == 1, f"{len(offline)} offline runs below {run}/wandb; `cox report --wandb {run}` writes one"
    arrived = Arrived()
    port = serve(arrived)
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {
            "HOME": home,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
            "WANDB_ERROR_REPORTING": "false",
        }
        # wandb marks what it has sent.
        copy = shutil.copytree(offline[0], pathlib.Path(home) / offline[0].name)
        command = [pathlib.Path(sys.executable).with_name("wandb"), "sync", str(copy)]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=120)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert not any(word in told.lower() for word in ("warn", "error", "fail", "corrupt", "skip")), told
    spec = without_empty(json.loads((run / "run_spec.json").read_text()))
    config = {key: value for key, value in arrived.config.items() if key != "_wandb"}
    assert config == spec, f"the config differs in {[key for key in spec if config.get(key) != spec[key]]}"
    losses = json.loads((run / "summary.json").read_text())["losses"]
    found = [line["train/loss"] for _, line in sorted(arrived.history.items()) if "train/loss" in line]
    # Scalars are of 32 bits.
    same = len(found) == len(losses) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(found, losses))
    assert same, f"{len(found)} losses arrived of {len(losses)}"
    tags = {tag for line in arrived.history.values() for tag in line}
    lost = {tag for tag in tags if tag not in arrived.summary}
    assert not lost, f"not in the summary: {sorted(lost)}"
    print(f"wandb {wandb.__version__}: {len(found)} losses, {len(tags)} tags, {len(config)} sections of the run file")


main()
