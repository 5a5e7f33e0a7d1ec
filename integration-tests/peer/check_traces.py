"""Takes the traces of a run with OpenTelemetry's own package: `check_traces.py COX OUTPUT_DIR`.

Each committed step must be one trace, whose root is rank 0's step, the other rank's beside it, and below each its phases, within its
time. Then the same run without a collector must say so once, and train. Needs grpcio and opentelemetry-proto; nothing leaves the machine.
"""

import collections
import concurrent.futures
import os
import subprocess
import sys
import threading

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

STEPS, RANKS = 3, 2


class Collector(service.TraceServiceServicer):
    def __init__(self):
        self.spans, self.services, self.lock = [], set(), threading.Lock()

    def Export(self, request, context):
        with self.lock:
            for process in request.resource_spans:
                of_process = {pair.key: pair.value for pair in process.resource.attributes}
                self.services.add(of_process["service.name"].string_value)
                self.spans += [span for library in process.scope_spans for span in library.spans]
        return messages.ExportTraceServiceResponse()


def train(cox, out, port):
    environment = dict(os.environ, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
    command = [cox, "run", "configs/quickstart.yaml", f"train.steps={STEPS}", f"run.output_dir={out}", "eval.samples=0"]
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def numbers(span):
    return {pair.key: pair.value.int_value for pair in span.attributes}


def main():
    cox, out = sys.argv[1:]
    collector = Collector()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    train(cox, f"{out}/taken", port)
    server.stop(None).wait()

    assert collector.services == {"coxswain"}, collector.services
    steps = collections.defaultdict(list)
    for span in collector.spans:
        assert len(span.trace_id) == 16 and len(span.span_id) == 8 and span.start_time_unix_nano <= span.end_time_unix_nano, span
        if "coxswain.step" in numbers(span):
            steps[span.trace_id].append(span)
    assert sorted({numbers(span)["coxswain.step"] for spans in steps.values() for span in spans})[:STEPS] == list(range(STEPS))
    whole = 0
    for spans in steps.values():
        known = {span.span_id: span for span in spans}
        assert len(known) == len(spans), "identities are one span's alone"
        [root] = [span for span in spans if not span.parent_span_id]
        of_ranks = [span for span in spans if span.name == root.name]
        if numbers(root)["coxswain.step"] >= STEPS:
            continue
        assert sorted(numbers(span)["coxswain.rank"] for span in of_ranks) == list(range(RANKS)), of_ranks
        assert numbers(root)["coxswain.rank"] == 0
        for span in spans:
            if span in of_ranks:
                assert span is root or span.parent_span_id == root.span_id
                continue
            above = known[span.parent_span_id]
            assert above in of_ranks and numbers(above) == numbers(span)
            assert above.start_time_unix_nano <= span.start_time_unix_nano and span.end_time_unix_nano <= above.end_time_unix_nano
        names = {span.name for span in spans}
        assert {"data", "forward", "backward", "communication", "optimizer"} <= names, names
        whole += 1
    assert whole == STEPS, (whole, [sorted(span.name for span in spans) for spans in steps.values()])

    said = train(cox, f"{out}/dropped", port)
    print(f"{len(collector.spans)} spans, {whole} steps of {RANKS} ranks")
    logs = [open(f"{out}/dropped/logs/rank{rank:04}/stderr.log").read() for rank in range(RANKS)]
    for log in logs:
        assert log.count("traces are dropped") == 1, (said, log)


main()
