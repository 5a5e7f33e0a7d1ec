"""A robot's loop over a policy that answers with chunks of actions, without a pause between two chunks::

    from openpi_client.websocket_client_policy import WebsocketClientPolicy
    from coxswain.robot import ActionStream

    with ActionStream(WebsocketClientPolicy("127.0.0.1", 8000), hz=20) as stream:
        while True:
            robot.act(stream.next(robot.observe()))      # at 20 Hz

While actions of one chunk are taken, the next one is asked for, and told what is left of the last (``prev_actions``) and how
many actions will be taken before the answer is there (``inference_delay``): ``cox serve`` lets the next chunk begin with those.
The policy is any object with ``infer(observation) -> {"actions": [horizon, size]}``. Needs NumPy.
"""

from __future__ import annotations

import collections
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

__all__ = ["ActionStream", "Policy"]

LATENCIES = 10
"""Answers whose latencies are remembered: the longest of them is what the next one may take."""


class Policy(Protocol):
    """What answers an observation with a chunk of actions."""

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]: ...


class ActionStream:
    """Actions one at a time.

    ``hz``: actions a second. ``every``: how many actions of a chunk are taken before the next one is asked for; half of the chunk if
    not given. ``blend``: over how many actions it is faded from the last chunk to the next one, where the answer took longer than was
    thought; 0 for none. ``waits`` counts actions that had to wait for an answer, the first one of an episode included.
    """

    def __init__(self, policy: Policy, *, hz: float, every: int | None = None, blend: int = 0) -> None:
        if hz <= 0 or blend < 0 or (every is not None and every < 1):
            raise ValueError(f"hz {hz} and every {every} must be above 0, and blend {blend} not below")
        self._policy, self._hz, self._every, self._blend = policy, hz, every, blend
        self._asking = ThreadPoolExecutor(1, "policy")
        self._latencies: collections.deque[float] = collections.deque(maxlen=LATENCIES)
        self.waits = 0
        self.reset()

    def __enter__(self) -> ActionStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it when the answer under way is there."""
        self._asking.shutdown()

    def reset(self) -> None:
        """Begins another episode: nothing is left of the last chunk."""
        self._left: Any = None
        self._taken = self._since = 0
        self._answer: Future[Any] | None = None

    @property
    def delay(self) -> int:
        """Actions that are taken before the next answer is there, by the longest latency of the last answers."""
        return math.ceil(max(self._latencies, default=0.0) * self._hz)

    def next(self, observation: dict[str, Any]) -> Any:
        """The action to take now, ``[size]``. Waits for the policy only if no action is left; raises what the policy raised."""
        if self._answer is not None and (self._answer.done() or self._is_empty()):
            self.waits += not self._answer.done()
            self._go_on_with(self._answer.result())
        if self._is_empty():
            self.waits += 1
            self._ask(observation)
            assert self._answer is not None
            self._go_on_with(self._answer.result())
        elif self._answer is None and self._taken >= (self._every or math.ceil((self._taken + len(self._left)) / 2)):
            self._ask(observation)
        action, self._left = self._left[0], self._left[1:]
        self._taken += 1
        self._since += 1
        return action

    def _is_empty(self) -> bool:
        return self._left is None or not len(self._left)

    def _ask(self, observation: dict[str, Any]) -> None:
        if not self._is_empty():
            left = np.ascontiguousarray(self._left, dtype=np.float32)
            observation = {**observation, "prev_actions": left, "inference_delay": min(self.delay, len(left))}
        self._since = 0
        self._answer = self._asking.submit(self._infer, observation)

    def _infer(self, observation: dict[str, Any]) -> Any:
        asked = time.monotonic()
        actions = np.asarray(self._policy.infer(observation)["actions"])
        self._latencies.append(time.monotonic() - asked)
        return actions

    def _go_on_with(self, chunk: Any) -> None:
        """Of the new chunk, what has not been taken of the last one meanwhile."""
        self._answer, late = None, min(self._since, len(chunk) - 1)
        ahead = chunk[late:].copy()
        shared = min(self._blend, len(ahead), 0 if self._is_empty() else len(self._left))
        for step in range(shared):
            new = (step + 1) / (shared + 1)
            ahead[step] = new * ahead[step] + (1 - new) * self._left[step]
        self._left, self._taken = ahead, late
