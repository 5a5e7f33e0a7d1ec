"""A robot's loop, with a policy whose answers come when the test says so."""

from __future__ import annotations

import threading
import unittest

try:
    import numpy as np
    from coxswain.robot import ActionStream
except ImportError as missing:
    raise unittest.SkipTest(f"skipped: coxswain.robot: {missing}") from None


class Counting:
    """Answers with the numbers from ``first`` on, in chunks of 8, of actions of one value; as `cox serve` does, it holds what is taken."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.may_answer = threading.Semaphore(0)

    def infer(self, observation: dict) -> dict:
        self.asked.append(observation)
        self.may_answer.acquire()
        chunk = np.arange(8.0)[:, None] + observation["first"]
        held = observation.get("inference_delay", 0)
        if held:
            chunk[:held] = observation["prev_actions"][:held]
        return {"actions": chunk}


class Loop(unittest.TestCase):
    def setUp(self) -> None:
        self.policy = Counting()

    def test_the_next_chunk_goes_on_where_the_last_one_is(self) -> None:
        with ActionStream(self.policy, hz=1) as stream:
            self.policy.may_answer.release()
            self.assertEqual([float(stream.next({"first": 0})[0]) for _ in range(4)], [0, 1, 2, 3])
            self.assertEqual(stream.waits, 1)
            # The half of a chunk is taken: it is asked for the next one, and goes on meanwhile.
            stream._latencies.append(1.5)
            self.assertEqual(float(stream.next({"first": 100})[0]), 4)
            self.assertEqual(float(stream.next({"first": 200})[0]), 5)
            self.policy.may_answer.release()
            stream._answer.result()
            self.assertEqual(float(stream.next({"first": 300})[0]), 102)
            told = self.policy.asked[1]
            self.assertEqual((told["first"], told["inference_delay"]), (100, 2))
            np.testing.assert_array_equal(told["prev_actions"][:, 0], [4, 5, 6, 7])
            self.assertEqual(stream.waits, 1)

    def test_a_late_answer_is_waited_for_when_nothing_is_left(self) -> None:
        with ActionStream(self.policy, hz=1, every=7) as stream:
            self.policy.may_answer.release()
            for _ in range(8):
                stream.next({"first": 0})
            threading.Timer(0.01, self.policy.may_answer.release).start()
            self.assertEqual(float(stream.next({"first": 50})[0]), 1)
            self.assertEqual(stream.waits, 2)

    def test_it_is_faded_into_the_next_chunk(self) -> None:
        with ActionStream(self.policy, hz=1, every=1, blend=1) as stream:
            self.policy.may_answer.release(3)
            stream.next({"first": 0})
            self.assertEqual(float(stream.next({"first": 21})[0]), 1)
            stream._answer.result()
            self.assertEqual(float(stream.next({"first": 0})[0]), (2 + 22) / 2)

    def test_another_episode_has_no_last_chunk(self) -> None:
        with ActionStream(self.policy, hz=1) as stream:
            self.policy.may_answer.release(2)
            stream.next({"first": 0})
            stream.reset()
            self.assertEqual(float(stream.next({"first": 7})[0]), 7)
            self.assertNotIn("prev_actions", self.policy.asked[1])


if __name__ == "__main__":
    unittest.main()
