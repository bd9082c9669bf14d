"""metrics.jsonl over kills and resumes, and the step clock."""

import io
import json

from app.training.metrics import MetricsLog, Progress, StepTimer


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_resume_drops_what_will_be_done_again(tmp_path):
    log = MetricsLog(tmp_path, first_step=0, tensorboard=False)
    for step in (1, 2, 3, 4):
        log.write(step, {"loss": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    log = MetricsLog(tmp_path, first_step=2, tensorboard=False)
    log.write(3, {"loss": 30.0})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_not_a_number_is_null(tmp_path):
    log = MetricsLog(tmp_path, first_step=0, tensorboard=True)
    log.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "tokens": 7})
    log.close()
    assert lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "tokens": 7}]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_timer_leaves_out_start_and_pauses():
    now = 0.0
    timer = StepTimer(clock=lambda: now)
    now = 100.0  # compilation
    timer.start()
    now = 102.0
    timer.start()  # only the first call starts the clock
    timer.step_done()
    with timer.paused():
        now = 1000.0
    now = 1002.0
    timer.step_done()
    assert timer.read() == 2.0
    now = 1009.0
    timer.step_done()
    assert timer.read() == 7.0


def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    progress = Progress(first_step=0, steps=100, stream=stream)
    progress.update(
        10, {"loss": 1.5, "grad_norm": 0.1, "learning_rate": 1e-3, "tokens_per_second": 1000.0, "step_seconds": 2.0}
    )
    progress.close()
    assert stream.getvalue() == (
        "step 10/100  loss 1.5000  grad_norm 0.100  lr 1.00e-03  1,000 tokens/s  2.000 s/step  3.0 min left\n"
    )
