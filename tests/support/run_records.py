"""Run records of every kind: complete, failed, hostile, with many classes, with one latency."""

import copy
import random
from typing import Any

from compress import report
from compress.results.run import RunRecord

Record = dict[str, Any]
NASTY = (
    '<script>alert("1")</script><img src=x onerror=alert(1)>|`*_@everyone #12 https://example.org \x1b[31m\u202e\ud800'
)
HOSTILE = NASTY + "W" * 300


def m(value: float | None, unit: str, how: str = "measured", *, note: str = "", reach: float | None = None) -> Record:
    low, high = (None, None) if reach is None or value is None else (value - reach, min(1.0, value + reach / 2))
    return {"value": value, "unit": unit, "how": how, "low": low, "high": high, "note": note}


def sizes(size: int, macs: int) -> Record:
    return {"parameters": m(size // 4, "parameters"), "macs": m(macs, "MACs"), "size_bytes": m(size, "bytes")}


# fmt: off
def stage(identity: str, accuracy: float, macs: int, size: int, **more: Any) -> Record:
    taken = {"accuracy": m(accuracy, "fraction", reach=0.022, note="169 validation samples; Wilson interval")}
    return {
        "id": identity, "stage": identity, "status": "done", "seconds": 12.34, "reason": None, "kind": "keras model",
        "settings": {"epochs": 4, "id": None}, "measurements": taken | sizes(size, macs),
        "facts": {
            "history": [{"loss": loss} for loss in (0.9, 0.31, 0.123456789)], "removed": {"conv_2": 12}, "fused": True,
        },
    } | more


FIGURES = {"macs": 2000, "parameters": 90, "size_bytes": 1200, "compute_ms": 0.002, "streamed_bytes": 0}


def pruning_step(**more: Any) -> Record:
    """Return a step of `prune` that halves the channels of one layer."""
    cost: Record = {"before": 0.002, "after": 0.001, "figures_before": FIGURES}
    return {
        "importance": "taylor", "allocation": "balanced", "done": True, "unsupported": [],
        "cost": cost | {"figures_after": FIGURES | {"macs": 500, "compute_ms": 0.001}},
        "layers": {"conv": {"before": 16, "after": 8}},
    } | more


def with_stages(*stages: Record) -> Record:
    """Return a complete run of these stages; missing keys of a stage get default values."""
    defaults = {"status": "done", "stage": "train", "settings": {}, "measurements": {}}
    return full() | {"stages": [{"id": stage.get("stage"), "facts": {}} | defaults | stage for stage in stages]}


def model(made_by: str, accuracy: float, size: int, macs: int, ms: float) -> Record:
    return {"stage": made_by, "measurements": sizes(size, macs) | {
        "accuracy": m(accuracy, "fraction", reach=0.011, note="629 test samples; Wilson interval"),
        "latency_ms": m(ms, "ms", reach=ms * 0.02, note="200 runs on the host, not on the device"),
        "latency_p90_ms": m(ms * 1.15, "ms"), "latency_p99_ms": m(ms * 1.3, "ms"),
    }}


def operators(count: int) -> list[Record]:
    names = (("CONV_2D", 97_344), ("DEPTHWISE_CONV_2D", 12_100), ("CONV_2D", 230_400), ("ADD", 0))
    ops: list[Record] = [{
        "index": i, "op": names[i % 4][0], "version": 3, "output": f"block_{i}/conv;block_{i}/relu", "reason": "",
        "placement": "tpu", "status": "Mapped to Edge TPU", "advice": "", "risk": "", "macs": names[i % 4][1],
    } for i in range(count - 1)]
    return [*ops, {
        "index": count - 1, "op": "SOFTMAX", "version": 2, "output": "probabilities", "placement": "cpu", "macs": 4_000,
        "status": "Operation not supported", "reason": "The input has 3 dimensions; the Edge TPU takes 1.",
        "advice": "Leave the softmax out and take the largest logit on the host.", "risk": "",
    }]


def per_class(names: list[str]) -> list[Record]:
    dice, rows = random.Random(7), []
    for name in names:
        before = dice.choice([0.97, 0.984, 1.0, 0.93, 0.86])
        after = min(1.0, round(before + dice.choice([-0.16, -0.048, -0.016, 0.0, 0.0, 0.016, 0.032]), 3))
        one, two = (m(value, "fraction", reach=0.06) for value in (before, after))
        rows.append({"name": name, "samples": 62, "original": one, "result": two, "ap50": None})
    return rows


def confusion(count: int) -> Record:
    dice = random.Random(3)
    rows = [[dice.choice([0, 0, 0, 0, 0, 0, 1, 2, 3]) for _ in range(count)] for _ in range(count)]
    for i, row in enumerate(rows):
        row[i] = 62 - sum(row[:i] + row[i + 1 :])
    return {"original": rows, "result": rows}


def latencies(ms: float) -> list[float]:
    dice = random.Random(ms)
    return [round(ms * (0.96 + dice.gammavariate(1.2, 0.05)), 4) for _ in range(199)] + [ms * 6]
DROP = m(0.0016, "fraction", reach=0.008, note="629 paired samples; bootstrap")
ON_DEVICE = m(0.0823, "ms", "predicted", reach=0.02, note="on the device, from its memory and speed")
PREDICTED = m(1.9, "ms", "predicted", note="predicted by `estimate`") | {"low": 1.47, "high": 2.45}
UNTRAINED = {"accuracy": m(None, "fraction", "missing", note="untrained"), "macs": m(2_360_000, "MACs")}
FULL: Record = {
    "schema_version": 1, "name": "digits", "status": "ok", "error": None,
    "degeneracy": None, "sensitivity": None, "examples": None, "coralline": "0.1.0", "seed": 0,
    "seconds": 43.1, "finished": "2026-11-20T15:40:00+00:00",
    "target": {"name": "edgetpu", "summary": "Coral Edge TPU, 8 MiB of memory on the chip, full-integer models"},
    "metrics": [
        {"name": "accuracy", "label": "Accuracy", "unit": "fraction", "change": "accuracy_drop", "limited": True},
    ],
    "pipeline": {"name": "digits", "model": {"builder": "cnn"}, "stages": [{"train": {"epochs": 12}}]},
    "data": {
        "source": "digits", "classes": list("0123456789"), "input_shape": [32, 32, 1],
        "samples": {"train": 999, "validation": 169, "test": 629},
        "preprocess": [{"resize": {"size": [32, 32]}}, {"scale": {"from": [0, 16], "to": [0, 1]}}],
        "counts": {"train": [100] * 10, "validation": [17] * 10, "test": [63] * 10}, "imbalance": 1.0, "missing": [],
        "shapes": [[8, 8, 1], [8, 8, 1]], "range": [0.0, 16.0], "dtypes": ["uint8"], "looked_at": 768,
        "corrupt": {"count": 0, "first": []}, "notes": [], "warnings": [], "targets": [], "samples_digest": "5a" * 32,
    },
    "stages": [
        stage("load", 0, 0, 0, seconds=0.4, reason="an untrained model", measurements=UNTRAINED),
        stage("train", 0.982, 2_360_000, 410_000),
        stage("prune", 0.964, 1_132_800, 204_800, status="cached", seconds=None, reason="as in an earlier run"),
        stage("distill", 0.978, 1_132_800, 204_800),
        stage("quantize", 0.976, 1_132_800, 106_824, kind="quantized tflite model"),
        stage("compile", 0.976, 1_132_800, 106_824, kind="checked tflite model"),
        stage("package", 0.976, 1_132_800, 106_824, kind="bundle"),
    ],
    "models": {
        "original": model("train", 0.992, 410_000, 2_360_000, 0.412),
        "result": model("package", 0.9904, 106_824, 1_132_800, 0.171),
    },
    "comparison": {
        "measurements": {
            "accuracy_drop": DROP, "agreement": m(0.9936, "fraction", reach=0.008),
            "macs_ratio": m(0.48, "fraction"), "size_ratio": m(0.26, "fraction"),
            "latency_ratio": m(0.415, "fraction", "predicted"),
        },
        "per_class": per_class(list("0123456789")), "confusion": confusion(10),
        "right": {"samples": 16, "original": "fffe", "result": "fffc"},
        "outputs": [
            {
                "name": "probabilities", "shape": [10], "sqnr_db": 31.4, "max_abs_error": 0.0625, "agreement": 0.9936,
                "channel_axis": None, "scales": [], "step": 0.00390625, "flat_channels": 0,
            },
            {
                "name": "map", "shape": [8, 8, 2], "sqnr_db": 28.0, "max_abs_error": 0.41, "agreement": None,
                "channel_axis": 2, "step": 2.5, "flat_channels": 1,
                "scales": [
                    {"channels": [0], "low": 0.0, "high": 640.0, "sqnr_db": 28.1, "constant": []},
                    {"channels": [1], "low": 0.0, "high": 1.0, "sqnr_db": 0.3, "constant": [1]},
                ],
            },
        ],
    },
    "latency": {
        "host": "usb3", "measurement": PREDICTED, "parts": {"fixed_ms": 1.2, "compute_ms": 0.7}, "streamed_bytes": 0,
        "advice": [{"what": "CONV_2D 3: 4 fewer save time", "saves_ms": 0.2}],
    },
    "cpu_latency": {
        "conditions": {"runtime": "ai-edge-litert 2.3.0", "threads": 1, "warmup": 20, "cpu": "Xeon 2.2 GHz"},
        "original": latencies(0.41), "result": latencies(0.17),
    },
    "placement": {
        "summary": "12 of 13 operators run on the Edge TPU", "compiled": False, "compiles": True, "failure": None,
        "reason": "edgetpu_compiler is not installed on this machine", "macs": {"tpu": 1_128_800, "cpu": 4_000},
        "how_to_compile": "edgetpu_compiler -s model.tflite\n(Linux on x86-64, Debian package edgetpu-compiler)",
        "ops": operators(13), "lookup_table": None,
        "cached_bytes": 90_112, "streamed_bytes": 0, "activation_bytes": 4_096,
        "expected_latency": {
            "usb3": {"summary": "USB 3, x86", "latency_ms": 1.9, "low_ms": 1.47, "high_ms": 2.45, "cpu_alone_ms": 0.07},
        },
    },
    "budget": [
        {"name": "accuracy_drop", "limit": 0.02, "unit": "fraction", "measured": DROP, "holds": True},
        {"name": "size_bytes", "limit": 131_072, "unit": "bytes", "measured": m(106_824, "bytes"), "holds": True},
        {"name": "latency_ms", "limit": 1.0, "unit": "ms", "measured": ON_DEVICE, "holds": True},
    ],
    "outputs": {
        "model.tflite": {"sha256": "9f86d081884c7d65" * 4, "size_bytes": 106_824},
        "digits.coralline": {"sha256": "60303ae22b998861" * 4, "size_bytes": 331_776},
        "model_explorer.json": {"sha256": "7d865e959b246691" * 4, "size_bytes": 12_345},
    },
    "environment": {
        "node": "host", "runtime": "ai-edge-litert 2.3.0",
        "python": "3.11.7", "system": "Linux 6.1.0", "cpu": "Xeon 2.2 GHz",
        "tools": {"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"},
    },
    "devices": [],
    "verdict": {"level": "usable with warnings", "reasons": ["edgetpu_compiler is not installed on this machine"]},
}


def full() -> Record:
    return copy.deepcopy(FULL)


def failed() -> Record:
    nothing: Record = {"status": "not run", "seconds": None, "kind": None, "facts": {}, "measurements": {}}
    unknown = m(None, "fraction", "missing", note="there is no result")
    return full() | {
        "status": "failed", "outputs": {}, "models": None,
        "error": {"stage": "prune", "message": "every channel of conv_1 is needed\n\nraise keep_macs", "exit_code": 5},
        "stages": [
            stage("load", 0.1, 2_360_000, 410_000),
            stage("prune", 0, 0, 0, **nothing | {"status": "failed", "seconds": 3.2}),
            stage("quantize", 0, 0, 0, **nothing),
        ],
        "budget": [{"name": "accuracy_drop", "limit": 0.02, "unit": "fraction", "measured": unknown, "holds": None}],
    } | dict.fromkeys(("data", "comparison", "latency", "cpu_latency", "placement"))


def bare() -> Record:
    """Return the record of a run that fails before its first stage."""
    error = {"stage": None, "message": "data.npz: cannot be read", "exit_code": 3}
    empty: Record = {"stages": [], "budget": [], "outputs": {}, "models": None}
    return full() | empty | dict.fromkeys(("data", "comparison", "latency", "cpu_latency", "placement")) | {
        "status": "failed", "error": error, "name": "bare",
    }


def spoiled(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        more = {HOSTILE: HOSTILE} if key in ("facts", "tools", "conditions") else {}
        return {name: spoiled(item, name) for name, item in value.items()} | more
    if isinstance(value, list):
        return [spoiled(item) for item in value]
    if isinstance(value, str) and key not in ("how", "unit", "status", "placement", "metrics", "change"):
        return f"{HOSTILE}{value}"
    return value


def hostile() -> Record:
    record: Record = spoiled(full())
    record["outputs"] = {HOSTILE: {"sha256": HOSTILE, "size_bytes": 3}}
    record["models"]["result"]["measurements"]["macs"]["value"] = float("inf")
    record["metrics"] = full()["metrics"]
    record["verdict"] = {"level": "not usable", "reasons": [HOSTILE, HOSTILE * 3]}
    return record | {"error": {"stage": HOSTILE, "message": HOSTILE * 3, "exit_code": 5}}


def many(count: int) -> Record:
    record, classes = full(), [f"grocery item {i}, organic" for i in range(count)]
    record["data"]["classes"] = classes
    record["comparison"] |= {"per_class": per_class(classes), "confusion": confusion(count)}
    record["budget"][0]["holds"] = False
    return record | {"status": "over budget", "error": {"stage": None, "message": "over the budget", "exit_code": 7}}


def crowded() -> Record:
    record = many(81)
    record["placement"] |= {"ops": operators(171), "compiled": True, "compiles": False, "failure": "internal error"}
    return record


def single() -> Record:
    record = full()
    record["cpu_latency"] |= {"original": [0.5], "result": [0.25]}
    record["stages"] = record["stages"][1:2]
    record["placement"] |= {"compiled": True}
    return record

def regression() -> Record:
    """Return a run whose result is worse than the mean: its R² is negative."""
    record = full()
    record["metrics"] = [
        {"name": "r2", "label": "R²", "unit": "fraction", "change": "r2_drop", "limited": False},
        {"name": "mae", "label": "Mean absolute error", "unit": "", "change": "mae_increase", "limited": True},
    ]
    for index, entry in enumerate([*record["stages"], *record["models"].values()]):
        del entry["measurements"]["accuracy"]
        entry["measurements"] |= {"r2": m(0.8 - 0.3 * index, "fraction"), "mae": m(1.5 + index, "")}
    record["comparison"] = {
        "measurements": {"r2_drop": m(0.3, "fraction"), "mae_increase": m(0.1, "fraction")},
        "per_class": [], "confusion": None,
    }  # fmt: skip
    record["budget"] = []
    return record


RECORDS = {make.__name__: make for make in (full, failed, bare, hostile, crowded, single)}
RECORDS["thirty"] = lambda: many(30)


def rendered(record: Record) -> dict[str, bytes]:
    return report.render(RunRecord.from_json(record))


def html_of(record: Record) -> str:
    """Return the page with ordinary spaces in place of no-break spaces, so that tests can search for a text."""
    return rendered(record)["report.html"].decode().replace("\xa0", " ")


def markdown_of(record: Record) -> str:
    return rendered(record)["report.md"].decode()


def every_measurement(record: Record) -> list[tuple[str, Record]]:
    measurements: list[tuple[str, Record]] = [(e["name"], e["measured"]) for e in record["budget"] or []]
    groups = [stage["measurements"] for stage in record["stages"] or []]
    groups += [model_record["measurements"] for model_record in (record["models"] or {}).values() if model_record]
    comparison = record["comparison"] or {"measurements": {}, "per_class": []}
    groups += [comparison["measurements"]]
    groups += [{"accuracy": row[which]} for row in comparison["per_class"] for which in ("original", "result")]
    return measurements + [item for group in groups for item in group.items()]
