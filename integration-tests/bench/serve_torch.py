#!/usr/bin/env python3
"""The peer of `cox serve`: the same policy in PyTorch (`coxswain_policy`) behind openpi's protocol.

    PYTHONPATH=launcher/python python serve_torch.py RUN_DIR PORT [--max-batch N] [--threads N]

As openpi's own server does it: asyncio, msgpack, one forward pass for one observation (`--max-batch 1`, the default). With a larger
bound observations that wait together share a pass, as in `cox serve`.
"""
import argparse
import asyncio
import os
import queue
import threading

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import websockets.asyncio.server
from openpi_client import msgpack_numpy

import coxswain_policy

arguments = argparse.ArgumentParser()
arguments.add_argument("directory")
arguments.add_argument("port", type=int)
arguments.add_argument("--max-batch", type=int, default=1)
arguments.add_argument("--threads", type=int, default=os.cpu_count())
arguments = arguments.parse_args()
torch.set_num_threads(arguments.threads)
policy = coxswain_policy.Policy.load(arguments.directory)
waiting = queue.Queue()


def answer_all():
    while True:
        batch = [waiting.get()]
        while len(batch) < arguments.max_batch:
            try:
                batch.append(waiting.get_nowait())
            except queue.Empty:
                break
        actions = policy.sample([observation for observation, _, _ in batch])
        for own, (_, loop, future) in zip(actions, batch):
            loop.call_soon_threadsafe(future.set_result, own)


async def attend(socket):
    packer = msgpack_numpy.Packer()
    await socket.send(packer.pack({"policy": "torch"}))
    loop = asyncio.get_running_loop()
    async for message in socket:
        future = loop.create_future()
        waiting.put((msgpack_numpy.unpackb(message), loop, future))
        await socket.send(packer.pack({"actions": await future}))


async def main():
    threading.Thread(target=answer_all, daemon=True).start()
    async with websockets.asyncio.server.serve(attend, "127.0.0.1", arguments.port, compression=None, max_size=None) as server:
        print("serving", flush=True)
        await server.serve_forever()


asyncio.run(main())
