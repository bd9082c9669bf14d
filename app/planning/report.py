"""A plan as text for a terminal."""

from app.planning.estimate import Plan

GB = 1e9


def table(plan: Plan) -> str:
    memory, step, compiled = plan["memory"], plan["step"], plan["compiled"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items()) or "one device"
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    lines = [
        f"{slices}{plan['topology']}: {plan['chips']} chips, {mesh}; seq_len {plan['seq_len']:,} x "
        f"{plan['global_batch']}, accumulation {plan['accumulation']}, remat {plan['remat']}",
        f"compiled in {plan['compile']['seconds']:.0f} s, {plan['compile']['resident_bytes'] / GB:.1f} GB of this "
        "machine's memory",
        "",
        f"memory a device: {memory['total'] / GB:.2f} of {memory['limit'] / GB:.2f} GB, "
        f"{'fits' if memory['fits'] else 'DOES NOT FIT'}",
        *(f"  {memory[name] / GB:8.2f} GB  {name}" for name in ("arguments", "outputs", "temporaries", "code")),
        "  largest buffers (not all live at once):",
        *(f"  {one['bytes'] / GB:8.2f} GB  {one['arrays']}  {one['source']}" for one in memory["largest"]),
        "",
        "model FLOPs a token, forward (training: 3 x)",
        *_shares(plan["model_flops_per_token"], 1e9, "GFLOP"),
        "",
        "the compiled step, a device, loops by their trips",
        f"  {compiled['flops'] / 1e12:12.2f} TFLOP of XLA's matrix products (kernels' not included)",
        f"  {compiled['hbm_bytes'] / GB:12.1f} GB HBM traffic of XLA's instructions",
        f"  {compiled['xla_cycles'] / 1e9:12.3f} Gcycles XLA, {compiled.get('kernel_cycles', 0) / 1e9:.3f} Gcycles in "
        f"{compiled.get('kernel_calls', 0):,} kernel calls",
        *(f"  no cost known for calls of {name}" for name in compiled["calls_without_cost"]),
        "",
        "collectives            axes              net     count         GB    seconds  hops  contention",
        *(
            f"  {row['kind']:20s} {'+'.join(row['axes']):16s}  {row['network']:4s} {row['count']:8,} "
            f"{row['bytes'] / GB:10.2f} {row['seconds']:10.3f} {row['hops']:5d} {row['contention']:11.2f}"
            for row in plan["collectives"]
        ),
        "",
        f"step: {step['seconds']:.2f} s estimated",
        *_shares(step["busy"], 1.0, "s", step["seconds"]),
        *_shares({f"waiting: {key}": value for key, value in step["exposed"].items()}, 1.0, "s", step["seconds"]),
        "",
        f"{plan['tokens_per_second_per_chip']:.1f} tokens/s/chip, MFU {100 * plan['mfu']:.1f} %",
        "assumed:",
        *(f"  - {line}" for line in plan["assumptions"]),
    ]
    return "\n".join(lines)


def row(plan: Plan) -> str:
    """One line: what --search compares."""
    mesh = " ".join(f"{axis}={size}" for axis, size in plan["mesh"].items())
    waiting = sum(plan["step"]["exposed"].values()) / plan["step"]["seconds"]
    return (
        f"{mesh:28s} remat={plan['remat']:10s} accumulation={plan['accumulation']:<3d} "
        f"{plan['memory']['total'] / GB:7.1f} GB  {plan['step']['seconds']:8.2f} s  "
        f"{plan['tokens_per_second_per_chip']:8.1f} tokens/s/chip  MFU {100 * plan['mfu']:5.1f} %  "
        f"waiting {100 * waiting:4.1f} %"
    )


def _shares(values: dict[str, float], unit: float, name: str, total: float | None = None) -> list[str]:
    total = total or sum(values.values())
    return [
        f"  {value / unit:12.3f} {name:5s} {100 * value / total:5.1f} %  {key}"
        for key, value in sorted(values.items(), key=lambda item: -item[1])
    ]
