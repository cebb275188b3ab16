"""The log of statistics that an executor has received and its caller has not read yet."""

from collections import deque

from sluice.executor.report_log import ReportLog
from sluice.executor.waiting import Timeout
from sluice.v1 import admin_pb2 as pb


class StepsLog(ReportLog):
    """Keeps the newest `limit` steps, and the latest statistics of the `limit` requests that changed last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.latest_iteration = 0
        self.tokens_per_block = 1
        self._steps: deque[pb.EngineStats] = deque(maxlen=limit)
        self._requests: dict[str, pb.RequestStats] = {}

    def put(self, response: pb.StreamStepsResponse) -> None:
        with self._lock:
            self._steps.extend(response.steps)
            if response.steps:
                self.latest_iteration = response.steps[-1].iteration
                self.tokens_per_block = response.steps[-1].tokens_per_kv_block or 1
            for stats in response.requests:
                # Removed first, so that the dict is in order of change.
                self._requests.pop(stats.request_id, None)
                self._requests[stats.request_id] = stats
            while len(self._requests) > self.limit:
                del self._requests[next(iter(self._requests))]
            self._condition.notify_all()

    def take_steps(self, timeout: Timeout) -> list[pb.EngineStats]:
        """Wait for steps and return all of them, oldest first; empty at the timeout.

        Raises the SluiceError that ended the feed, or RuntimeError after `close`, once all steps have been returned.
        """
        with self._lock:
            self._wait(lambda: bool(self._steps), timeout)
            steps = list(self._steps)
            self._steps.clear()
            return steps

    def take_requests(self, timeout: Timeout) -> list[pb.RequestStats]:
        """Like `take_steps`: the latest statistics of each request, in order of change."""
        with self._lock:
            self._wait(lambda: bool(self._requests), timeout)
            requests, self._requests = list(self._requests.values()), {}
            return requests
