#!/usr/bin/env python3
"""Does openpi's own client, as PyPI has it, get on with `cox serve`?

    cox serve RUN_DIR --listen 127.0.0.1:8000
    python serve_client.py 127.0.0.1:8000 [TOKEN]          # needs openpi-client
    SSL_CERT_FILE=cert.pem python serve_client.py wss://localhost:8000 [TOKEN]

Sends random observations of the shapes that the server tells, several clients at once, then nonsense of every kind; fails (exit 1)
if an answer has another shape, differs between equal seeds, does not begin with the actions that are taken meanwhile, or if nonsense
is not refused in words.
"""
import sys
import threading

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

host, port = sys.argv[1].rsplit(":", 1)
token = sys.argv[2] if len(sys.argv) > 2 else None


def connect():
    return WebsocketClientPolicy(host=host, port=int(port), api_key=token)


def observation(metadata, seed):
    draws, out = np.random.default_rng(seed), {"prompt": "open the drawer", "seed": seed}
    for name, value in metadata["inputs"].items():
        if value["dtype"] == "uint8":
            out[name] = draws.integers(0, 256, value["shape"], np.uint8)
        elif value["dtype"] == "float32":
            out[name] = draws.normal(size=value["shape"])  # float64, as robots send it
    return out


def refused(client, change, wanted):
    bad = observation(client.get_server_metadata(), 0)
    change(bad)
    try:
        client.infer(bad)
    except RuntimeError as error:
        assert wanted in str(error), f"{error}: not {wanted!r}"
    else:
        raise AssertionError(f"not refused: {wanted}")


def main():
    client = connect()
    metadata = client.get_server_metadata()
    shape = tuple(metadata["outputs"]["actions"]["shape"])
    alone = [client.infer(observation(metadata, seed)) for seed in range(4)]
    for answer in alone:
        assert answer["actions"].shape == shape and answer["actions"].dtype == np.float32
        assert np.isfinite(answer["actions"]).all() and answer["server_timing"]["infer_ms"] > 0
    again = client.infer(observation(metadata, 2))["actions"]
    assert np.array_equal(again, alone[2]["actions"]), "the same seed and observation"
    apart = observation(metadata, 2)
    for name, value in metadata["inputs"].items():
        if value["dtype"] == "uint8":
            apart[name] = np.ascontiguousarray(np.moveaxis(apart[name], -1, -3))
    assert np.array_equal(client.infer(apart)["actions"], again), "channels first, as PyTorch has them"

    if "prev_actions" in metadata["optional"]:
        left = again[1:]
        going_on = {**observation(metadata, 3), "prev_actions": left, "inference_delay": min(2, len(left))}
        begun = client.infer(going_on)["actions"][: going_on["inference_delay"]]
        np.testing.assert_allclose(begun, left[:2], rtol=1e-3, atol=1e-3, err_msg="actions that are taken meanwhile")

    errors = []

    def robot(seed):
        try:
            own = connect()
            for _ in range(5):
                answer = own.infer(observation(metadata, seed))["actions"]
                np.testing.assert_allclose(answer, alone[seed]["actions"], rtol=1e-4, atol=1e-4)
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            errors.append(error)

    robots = [threading.Thread(target=robot, args=(seed,)) for seed in range(4)]
    for thread in robots:
        thread.start()
    camera = next(name for name, value in metadata["inputs"].items() if value["dtype"] == "uint8")
    numbers = next(name for name, value in metadata["inputs"].items() if value["dtype"] == "float32")
    height, width = metadata["inputs"][camera]["shape"][-3:-1]
    refused(client, lambda o: o.pop(camera), f"{camera}: missing")
    refused(client, lambda o: o.update({camera: np.zeros((2, 2, 3), np.uint8)}), "found uint8 [2, 2, 3]")
    refused(client, lambda o: o.update({camera: np.zeros((height, width), np.uint8)}), "height, width, RGB)")
    refused(client, lambda o: o.update({camera: np.zeros((height, width, 3), np.float32)}), "found float32")
    refused(client, lambda o: o[numbers].put(0, np.nan), "NaN")
    refused(client, lambda o: o.pop("prompt"), "prompt: missing")
    refused(client, lambda o: o.update({numbers: {"a": 1}}), f"{numbers}/a (1)")
    for thread in robots:
        thread.join()
    if errors:
        raise errors[0]
    # Larger than anything: refused while it is on its way, at the end of this client's line.
    refused(connect(), lambda o: o.update({camera: np.zeros((5000, 5000, 3), np.uint8)}), "at most")
    assert np.array_equal(client.infer(observation(metadata, 2))["actions"], again), "the server goes on"
    print("openpi-client is answered:", shape)


main()
