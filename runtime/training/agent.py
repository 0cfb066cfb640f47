"""Who starts the processes of a machine, watches them and ends them: torch's elastic agent, with stops that it keeps.

torch's own raises out of the closing when a second signal comes, and then neither ends the processes nor itself; one
process that hangs makes every further signal wait for the whole time again.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext, api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from wangen.generator.errors import WAS_STOPPED, WRONG_USAGE
from wangen.runtime.interrupt import ECHO_S

log = logging.getLogger("wangen")

PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""The variable that says for how many seconds processes may end what they do after a stop."""
END_S = 5
"""So long the processes have to end after a second stop; then they are killed. A state is whole or absent."""
LOOK_S = 0.1
"""The pause before processes that are to end are looked at again."""


class _Stops:
    """What torch's agent hears of signals: the first raises torch's exception, a later one only shortens the end.

    Attributes:
        again: a second one came that is no echo of the first.
    """

    def __init__(self) -> None:
        self.again = False
        self._first: SignalException | None = None
        self._since_s = 0.0
        self._held = self._raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        setattr(api, "_terminate_process_handler", self._hear)  # noqa: B010 - torch installs it at every start

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: object) -> None:
        if self._first is None:
            self._since_s = time.monotonic()
            self._first = SignalException(f"signal {number}", signal.Signals(number))
        elif time.monotonic() - self._since_s >= ECHO_S:
            self.again = True
        self._raise()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Break nothing off in this block.

        Raises:
            SignalException: the first signal came in the block, which has ended.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self._raise()

    def _raise(self) -> None:
        if self._first and not self._raised and not self._held:
            self._raised = True
            raise self._first


class Agent(LocalElasticAgent):
    """torch's, but it says when it starts the processes again, and what was stopped is not started again, nor a line
    that is wrong: it would be as wrong the next time. It has always ended its processes when it ends.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._stops = _Stops()

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the processes to their end.

        Raises:
            SignalException: this process was told to stop.
        """
        with self._stops:
            result: RunResult = super().run(role)
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._stops.held():  # else one that has just begun would be nobody's
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._stops.held():
            result: RunResult = super()._monitor_workers(worker_group)
        if not result.failures:
            return result
        rank, failure = min(result.failures.items(), key=lambda found: found[1].timestamp)
        wrong = any(failure.exitcode == WRONG_USAGE for failure in result.failures.values())
        if wrong or failure.exitcode == WAS_STOPPED:  # as the others are that lose one
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            most = worker_group.spec.max_restarts
            log.warning("  process %d %s: all begin again from the last saved state (restart %d of %d)", rank,
                        end_of(failure), most - self._remaining_restarts + 1, most)  # fmt: skip
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        with self._stops.held():
            timeout = timeout or int(os.environ.get(PATIENCE, "30"))  # torch before 2.13 does not hand it over
            if isinstance(self._pcontext, SubprocessContext):
                self._wait_for_end(self._pcontext, death_sig, timeout)
                self._pcontext.close(death_sig, END_S)
                self._pcontext = None
            super()._shutdown(death_sig)

    def _wait_for_end(self, context: SubprocessContext, how: signal.Signals, timeout_s: float) -> None:
        """Tell all processes to end and wait for them, until a second stop comes or the time is over."""
        until_s = time.monotonic() + timeout_s
        running = [each for each in context.subprocess_handlers.values() if each.proc.poll() is None]
        for each in running:
            with suppress(ProcessLookupError):  # it has just ended
                each.close(how)
        while any(each.proc.poll() is None for each in running) and time.monotonic() < until_s:
            if self._stops.again:
                log.warning("  stopping at once: what does not end in %d seconds is killed", END_S)
                return
            time.sleep(LOOK_S)


def end_of(failure: ProcessFailure) -> str:
    """How a process has ended, in words."""
    by_signal = failure.exitcode < 0
    return f"was ended by {failure.signal_name()}" if by_signal else f"ended with exit code {failure.exitcode}"
