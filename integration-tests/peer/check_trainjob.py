"""Takes the progress of a run as Kubeflow Trainer's controller does: `check_trainjob.py COX CERTIFICATES OUTPUT_DIR`.

A server with TLS, named by the three variables that the controller sets in the pods of a TrainJob, reads what arrives with the models of
`kubeflow-trainer-api`: the newest token each time, never two messages within five seconds but for the last, which is at 100 % and has the run's
last loss. Then the same run with a server that refuses, and with one that is gone: a line, and the run trains. Nothing leaves the machine.
"""

import json
import os
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kubeflow_trainer_api import models

STEPS = 40
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/cox/status"
MARK = "cannot report the TrainJob's progress"


class Controller:
    """What has arrived: when, with which token, what."""

    def __init__(self, certificates, token):
        self.arrived, self.answer, controller = [], 200, self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == PATH, self.path
                controller.arrived.append((time.monotonic(), self.headers["Authorization"], body))
                with open(token, "w") as file:
                    file.write(f"token-{len(controller.arrived)}\n")
                self.send_response(controller.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{certificates}/cert.pem", f"{certificates}/key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def train(cox, out, steps, variables):
    command = [cox, "run", "configs/quickstart.yaml", f"train.steps={steps}", f"run.output_dir={out}", "eval.samples=0"]
    environment = dict(os.environ, **variables)
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def main():
    cox, certificates, out = sys.argv[1:]
    token = f"{out}/token"
    with open(token, "w") as file:
        file.write("token-0\n")
    controller = Controller(certificates, token)
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{controller.port}{PATH}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": f"{certificates}/cert.pem",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": token,
    }
    said = train(cox, f"{out}/taken", STEPS, variables)
    assert MARK not in said, said
    times, tokens, bodies = zip(*controller.arrived)
    assert list(tokens) == [f"Bearer token-{number}" for number in range(len(tokens))], tokens
    pauses = [later - earlier for earlier, later in zip(times, times[1:-1])]
    assert all(pause > 4.5 for pause in pauses), pauses
    percents = []
    for body in bodies:
        read = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        kept = read.to_dict()["trainerStatus"]
        assert kept["metrics"] == body["trainerStatus"]["metrics"], (kept, body)
        assert all(metric["name"] and metric["value"] for metric in kept["metrics"]), kept
        percents.append(kept["progressPercentage"])
    assert percents == sorted(percents) and percents[-1] == 100 and max(percents[:-1], default=0) < 100, percents
    last = {metric["name"]: metric["value"] for metric in bodies[-1]["trainerStatus"]["metrics"]}
    summary = json.load(open(f"{out}/taken/summary.json"))
    assert float(last["loss"]) == summary["losses"][-1] and last["step"] == str(STEPS), (last, summary["losses"][-1])
    assert bodies[-1]["trainerStatus"]["estimatedRemainingSeconds"] == 0, bodies[-1]

    controller.answer = 403
    said = train(cox, f"{out}/refused", 3, variables)
    assert said.count(MARK) == 1 and "403" in said and "token-" not in said, said
    controller.server.shutdown()
    controller.server.server_close()
    said = train(cox, f"{out}/gone", 3, variables)
    assert said.count(MARK) == 1, said
    print(f"{len(bodies)} messages at {percents} %, a refusal and an absence are a line each")


main()
