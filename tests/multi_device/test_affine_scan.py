"""The exclusive prefix composition over ranks against composing the maps one by one in float64, on fake CPU devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from app.ops import affine_scan
from app.ops.affine_scan import AffineMap, SequenceAxis, exchange_rounds, exclusive_scan, sequence_axis

K, V = 3, 5


def maps(P, seed=0):
    """[P,2,K,K] transitions and [P,2,K,V] biases (two heads), and an initial state."""
    rng = np.random.default_rng(seed)
    shapes = ((P, 2, K, K), (P, 2, K, V), (2, K, V))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def wanted(transition, bias, initial, reverse):
    states, state = [], np.asarray(initial, np.float64)
    order = range(len(bias))[::-1] if reverse else range(len(bias))
    for rank in order:
        states.append(state)
        state = transition[rank].astype(np.float64) @ state + bias[rank]
    return np.stack(states[::-1] if reverse else states)


def scan(axis, P, transition, bias, initial, reverse):
    shape = (P,) if len(axis.names) == 1 else (P // 2, 2)
    mesh = Mesh(np.array(jax.devices()[:P]).reshape(shape), axis.names)

    def body(transition, bias):
        local = AffineMap(transition[0], bias[0])
        start = None if initial is None else jnp.asarray(initial)
        return exclusive_scan(local, axis, initial_state=start, reverse=reverse)[None]

    spec = PS(axis.names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(transition, bias))


def worst(axis, P):
    """Largest relative error of a rank's state, over both directions, with and without an initial state."""
    transition, bias, initial = maps(P)
    errors = []
    for reverse in (False, True):
        for start in (None, initial):
            got = scan(axis, P, transition, bias, start, reverse)
            want = wanted(transition, bias, np.zeros_like(initial) if start is None else start, reverse)
            differences, sizes = (np.linalg.norm(x.reshape(P, -1), axis=1) for x in (got - want, want))
            errors += [d / s if s else d * np.inf if d else 0.0 for d, s in zip(differences, sizes, strict=True)]
    return max(errors)


AXES = [
    *((P, SequenceAxis(("c",))) for P in (2, 3, 4, 5, 6, 7, 8)),
    (8, SequenceAxis(("c", "e"))),
    *((P, SequenceAxis(("c",), slices=slices)) for P, slices in ((4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8))),
    (8, SequenceAxis(("c", "e"), slices=4)),
    *((P, SequenceAxis(("c",), exchange="all_gather")) for P in (3, 8)),
]


@pytest.mark.parametrize(("P", "axis"), AXES)
def test_equals_composing_one_by_one(P, axis):
    assert worst(axis, P) < 2e-6


def test_negative_controls(monkeypatch):
    """Swapped order of composition, the wrong neighbour and the wrong slice are all far outside the tolerance."""
    flat, sliced = SequenceAxis(("c",)), SequenceAxis(("c",), slices=2)
    with monkeypatch.context() as patch:
        product = affine_scan.matmul
        patch.setattr(affine_scan, "matmul", lambda a, b: product(b, a) if a.shape == b.shape else product(a, b))
        assert worst(flat, 8) > 0.1
    with monkeypatch.context() as patch:
        send = SequenceAxis.send
        patch.setattr(SequenceAxis, "send", lambda self, x, pairs: send(self, x, [(d, s) for s, d in pairs]))
        assert worst(flat, 8) > 0.1
        assert worst(sliced, 8) > 0.1
    with monkeypatch.context() as patch:
        patch.setattr(affine_scan, "_place", lambda rank, width, reverse: rank % width)
        assert worst(sliced, 8) > 0.1


@pytest.mark.parametrize("P", [2, 3, 4, 5, 8])
def test_rounds_and_what_they_carry(P):
    """As many transfers as stated, all float32, and the transition not in the last rounds."""
    transition, bias, _ = maps(P)
    mesh = Mesh(np.array(jax.devices()[:P]), ("c",))

    def body(transition, bias):
        return exclusive_scan(AffineMap(transition[0], bias[0]), SequenceAxis(("c",)))[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=PS("c"), out_specs=PS("c"), check_vma=False)
    inner = jax.make_jaxpr(mapped)(transition, bias).eqns[0].params["jaxpr"]
    sent = [e.invars[0].aval for e in inner.eqns if e.primitive.name == "ppermute"]
    assert all(x.dtype == jnp.float32 for x in sent)
    shapes = [x.shape for x in sent]
    assert (shapes.count((2, K, V)), shapes.count((2, K, K))) == exchange_rounds(P)


def test_only_one_rank_a_slice_talks_to_another_slice():
    P, slices = 8, 2
    mesh = Mesh(np.array(jax.devices()), ("c",))
    transition, bias, _ = maps(P)

    def body(transition, bias):
        return exclusive_scan(AffineMap(transition[0], bias[0]), SequenceAxis(("c",), slices=slices))[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=PS("c"), out_specs=PS("c"), check_vma=False)
    inner = jax.make_jaxpr(mapped)(transition, bias).eqns[0].params["jaxpr"]
    sends = [e for e in inner.eqns if e.primitive.name == "ppermute"]
    across = [(e, pair) for e in sends for pair in e.params["perm"] if pair[0] // 4 != pair[1] // 4]
    assert [(pair, e.invars[0].aval.shape) for e, pair in across] == [((3, 4), (2, K, V))]


def test_wrong_axes_are_refused():
    with pytest.raises(ValueError, match="exchange must be 'ppermute' or 'all_gather', got 'ring'"):
        SequenceAxis(("c",), exchange="ring")
    with pytest.raises(ValueError, match="slices must be at least 1, got 0"):
        SequenceAxis(("c",), slices=0)
    mesh = Mesh(np.array(jax.devices()), ("c",))

    def body(x):
        sequence_axis(dataclasses.replace(SequenceAxis(("c",)), slices=3))
        return x

    with pytest.raises(ValueError, match="8 ranks do not divide into slices=3"):
        jax.shard_map(body, mesh=mesh, in_specs=PS("c"), out_specs=PS("c"), check_vma=False)(jnp.zeros(8))
