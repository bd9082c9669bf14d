"""HBM bytes that instructions read and write: slices count what they cut out, updates in place what they write."""

from app.planning.hlo import COLLECTIVES, Computation, Instruction, Module, hbm_bytes, shape_bytes

# Operations that touch no memory by themselves (what they call does).
_NONE = frozenset(
    {
        "add-dependency", "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "iota",
        "opt-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
    }
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_DEPTH = 8  # of fusions in fusions; below, a whole operand is counted


def bytes_moved(module: Module, x: Instruction, computation: Computation) -> int:
    """Of one run of an instruction outside fusions. Copies count where they start, collectives not at all."""
    if x.operation in _NONE or x.operation.endswith("-done") or x.operation.removesuffix("-start") in COLLECTIVES:
        return 0
    if x.operation == "fusion":
        return _fusion(module, x, computation)
    if x.operation == "dynamic-update-slice":
        return 2 * _size(computation, x.operands[1])
    if x.operation in ("dynamic-slice", "slice"):
        return 2 * hbm_bytes(x.result)
    if x.operation.endswith("-start"):
        return hbm_bytes(x.result)
    return hbm_bytes(x.result) + sum(hbm_bytes(computation[name].result) for name in x.operands if name in computation)


def _size(computation: Computation, name: str) -> int:
    return shape_bytes(computation[name].result) if name in computation else 0


def _fusion(module: Module, x: Instruction, computation: Computation) -> int:
    inner = module.computations.get(x.called("calls"), {})
    parameters = {y.inside: y.name for y in inner.values() if y.operation == "parameter"}
    read = 0
    for index, name in enumerate(x.operands):
        whole = hbm_bytes(computation[name].result) if name in computation else 0
        read += _read(module, inner, parameters.get(str(index), ""), whole) if whole else 0
    root = module.root(x.called("calls"))
    if root is None:
        return read + hbm_bytes(x.result)
    if root.operation != "tuple":
        return read + _written(module, inner, root, hbm_bytes(x.result))
    results = [inner[name] for name in root.operands]
    share = hbm_bytes(x.result) / max(1, sum(shape_bytes(y.result) for y in results))  # what is not in VMEM
    return read + int(sum(_written(module, inner, y, shape_bytes(y.result)) for y in results) * share)


def _read(module: Module, inner: Computation, name: str, whole: int, depth: int = 0) -> int:
    """Bytes of the value `name` inside a fusion that are read, `whole` unless only slices of it are."""
    total = 0
    for user in inner.values():
        if name not in user.operands or (user.operation == "tuple" and user.is_root):
            continue
        place = user.operands.index(name)
        if user.operation in _SLICES and place == 0:
            total += shape_bytes(user.result)
        elif user.operation == "bitcast" and depth < _DEPTH:
            total += _read(module, inner, user.name, whole, depth + 1)
        elif user.operation == "fusion" and depth < _DEPTH:
            nested = module.computations.get(user.called("calls"), {})
            names = {y.inside: y.name for y in nested.values() if y.operation == "parameter"}
            total += _read(module, nested, names.get(str(place), ""), whole, depth + 1)
        elif user.operation != "dynamic-update-slice" or place != 0:
            return whole
    return min(total, whole)


def _written(module: Module, inner: Computation, x: Instruction, whole: int, depth: int = 0) -> int:
    """Bytes of a fusion's result that are written: the update alone if it is one in place."""
    while x.operation == "bitcast" and x.operands[0] in inner:
        x = inner[x.operands[0]]
    if x.operation == "parameter":
        return 0
    if x.operation == "dynamic-update-slice":
        return min(whole, _size(inner, x.operands[1]))
    if x.operation == "fusion" and depth < _DEPTH:
        root = module.root(x.called("calls"))
        if root is not None and root.operation != "tuple":
            return _written(module, module.computations[x.called("calls")], root, whole, depth + 1)
    return whole
