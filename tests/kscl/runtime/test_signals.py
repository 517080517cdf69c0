"""A request to stop, and what a second signal means."""

from __future__ import annotations

import os
import signal

import pytest

from kscl.runtime import processes as signals
from kscl.runtime.processes import stop_requests


def test_a_second_sigterm_is_taken_for_the_first_as_a_scheduler_and_a_launcher_send_one_each():
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        assert stop.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts_at_once(monkeypatch, number):
    if number == signal.SIGTERM:
        monkeypatch.setattr(signals, "ECHO_SECONDS", -1.0)  # as if it came later
    with stop_requests() as stop:
        os.kill(os.getpid(), number)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
