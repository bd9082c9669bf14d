"""Which steps are traced, and that the trace is there for XProf."""

import contextlib

import jax
import jax.numpy as jnp

from app.training import profile


def test_a_trace_of_three_steps_is_written(tmp_path):
    steps = [(step, jnp.full(8, step)) for step in range(3, 12)]
    seen = [(step, float(jax.jit(jnp.sum)(batch))) for step, batch in profile.traced(steps, 5, str(tmp_path))]
    assert seen == [(step, 8.0 * step) for step in range(3, 12)]
    (trace,) = tmp_path.rglob("*.xplane.pb")
    assert trace.stat().st_size > 0 and trace.parts[-4:-2] == ("plugins", "profile")


def test_traces_begin_and_end_with_their_steps(monkeypatch):
    """Also where the loop ends first, and not at all for 0."""
    events = []

    @contextlib.contextmanager
    def trace(directory):
        events.append("start")
        yield
        events.append("stop")

    monkeypatch.setattr(jax.profiler, "trace", trace)

    def run(numbers, first):
        events.clear()
        for step, _ in profile.traced([(number, None) for number in numbers], first, "nowhere"):
            events.append(step)
        return list(events)

    assert run(range(1, 6), 2) == [1, "start", 2, 3, 4, "stop", 5]
    assert run(range(1, 4), 3) == [1, 2, "start", 3, "stop"]
    assert run(range(1, 4), 0) == [1, 2, 3] == run(range(1, 4), 9)
