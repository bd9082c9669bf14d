"""Which exit status an error is: the launchers start a job again after 128-255, and never after a bug."""

import jax
import pytest

from app import train
from app.config import ConfigError
from app.training.checkpoint import StorageError
from data.manifest import DataError

GLOO = "UNKNOWN: Gloo AllGather failed: [gloo/transport/tcp/pair.cc:538] Read error: Connection reset by peer"


@pytest.mark.parametrize(
    "error, status",
    [
        (ConfigError("seq_len"), 2),
        (DataError("no such file"), 2),
        (train.NonFiniteTraining("step 3"), 3),
        (jax.errors.JaxRuntimeError("INTERNAL: a core halted"), 202),
        (ValueError(GLOO), 202),  # from jax's gather among processes; was taken for a bug, which ends the job
        (StorageError("full"), 203),
        (OSError(28, "No space left on device"), 203),
        (ValueError("UNKNOWN words of ours"), 1),
        (KeyError("UNKNOWN: x"), 1),
    ],
)
def test_the_status_of_an_error(error, status, capsys):
    assert train.failure(error) == status
    said = capsys.readouterr().err
    assert str(error) in said
    assert (type(error).__name__ in said) == (status == 1 or status > 128)  # a user's mistake needs no class name
