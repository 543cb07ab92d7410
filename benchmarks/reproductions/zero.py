"""ZeRO's arithmetic (SC 2020): bytes a rank of 64 holds for 7.5 billion parameters under each stage, from what a captured step keeps of each.

Mixed precision with Adam keeps 2 bytes of parameter, 2 of gradient and 12 of fp32 master and moments. Stage 1 divides the 12 among the ranks, stage 2
the gradient too, stage 3 everything. The bytes of each kind are counted in a captured step of Llama-7b with fp32 masters, not taken from the paper.
"""

from __future__ import annotations

from typing import Any

from tierwise import pipeline
from tierwise.ir import Role

PARAMETERS, RANKS, GB = 7.5e9, 64, 10**9
PUBLISHED_GB = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.9}  # stage 0: plain data parallelism
DIVIDED = {0: (), 1: (Role.OPTIMIZER_STATE,), 2: (Role.OPTIMIZER_STATE, Role.GRAD), 3: (Role.OPTIMIZER_STATE, Role.GRAD, Role.PARAM)}


def rows() -> list[dict[str, Any]]:
    model = pipeline.capture_model("llama-7b", batch=1, seq=128, masters="fp32")
    bytes_of = {role: sum(s.nbytes for s in model.graph.storages if s.role is role) / model.parameters for role in DIVIDED[3]}
    found = []
    for stage, divided in DIVIDED.items():
        nbytes = PARAMETERS * sum(per_parameter / (RANKS if role in divided else 1) for role, per_parameter in bytes_of.items())
        published = PUBLISHED_GB[stage] * GB
        found.append({
            "case": "7.5 billion parameters, 64 ranks", "way": f"stage {stage}" if stage else "data parallel", "peak_bytes": round(nbytes),
            "predicted_peak_bytes": round(nbytes), "published_bytes": round(published), "deviation": nbytes / published - 1,
            "bytes_for_a_parameter": {str(role): value for role, value in bytes_of.items()},
            "why": "published to one decimal",
        })  # fmt: skip
    return found
