"""gist: hold what waits for backward in an encoding made for the pair of layers that uses it, on the device, between its two uses.

Paper    Jain, Phanishayee, Mars, Tang, Pekhimenko, ISCA 2018.
Idea     a feature map is used twice, far apart; in between nobody reads it, and what the second use needs of it is often much less.
Rule     ReLU -> pool      a bit for each value: ReLU's backward needs the signs, pooling's the place of each maximum, 4 bits, and neither map
         ReLU -> conv      sparse: rows of 256, a byte for each column, dense again before backward, if that is smaller
         the rest          dpr: rounded to fp16, fp10 or fp8 for backward alone (lossy; asked for by dpr=...)
         Each is encoded after its last forward use; what is rounded or sparse is decoded before its first backward use.
Differs  nothing is encoded if everything fits as it is. Sparsity is by kind of layer unless the problem brings it. Gist's in-place ReLU is the
         model's affair here: a captured step has it where the model has it. Kernels that read codes take as long as those that do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import BadInput
from ..ir import Graph, Phase, Problem, Schedule
from ._codecs import ROUNDED, can_code, with_codecs, with_variants_on_codes
from ._fit import device_peak
from ._gaps import Swap, build
from ._layers import forward_uses, is_conv, saved_for_backward

DECIDES = "which encoding each stash has"
FIDELITY = "like"
EXECUTABLE = "simulated only: regions save tensors as they are"
EXACTNESS = "exact if dpr is none, as it is unless asked for"
LOSSLESS = ("bit1", "argmax4", "csr")


def prepare(problem: Problem, *, dpr: str = "none") -> Problem:
    _check(dpr)
    return with_variants_on_codes(with_codecs(problem, (*LOSSLESS, *([dpr] if dpr in ROUNDED else []))))


def plan(problem: Problem, *, dpr: str = "none") -> Schedule:
    """dpr: what the stashes are rounded to that no exact encoding fits: none, fp16, fp10 or fp8."""
    _check(dpr)
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    variants = _variants(problem)
    swaps = [swap for saved in saved_for_backward(problem.graph) if (swap := _encoded(problem, variants, dpr, *saved))]
    return build(problem, swaps, variants=variants)


def _check(dpr: str) -> None:
    if dpr not in ("none", *ROUNDED):
        raise BadInput(f"dpr is {dpr!r}; gist knows none, {', '.join(ROUNDED)}")


def _variants(problem: Problem) -> dict[int, str]:
    """ReLUs and pools whose backward makes do with codes. A ReLU whose output a later layer's backward reads anyway does not."""
    graph = problem.graph
    from_places = {v.op for v in problem.costs.variants if v.name == "from places" and _encodes(problem, v.forms)}
    found = dict.fromkeys(sorted(from_places), "from places")
    for variant in problem.costs.variants:
        if variant.name == "from signs" and _encodes(problem, variant.forms):
            others = {use for storage in variant.forms for use in graph.readers[storage]}
            others -= {variant.op, *from_places, *(use for use in others if graph.ops[use].phase is Phase.FORWARD)}
            if not others:
                found[variant.op] = variant.name
    return found


def _encodes(problem: Problem, forms: Mapping[int, str]) -> bool:
    device, codecs = problem.machine.device.name, problem.costs.codec_named
    return all(device in codecs[form].encode_bytes_per_second for form in forms.values())


def _encoded(problem: Problem, variants: dict[int, str], dpr: str, storage: int, last_forward: int, first_backward: int) -> Swap | None:
    """The stash in its encoding from its last forward use to its first backward use; None where it stays as it is."""
    if first_backward <= last_forward + 1:
        return None
    chosen = [problem.costs.variant_of[op, name] for op, name in variants.items()]
    by_code = next((variant.forms[storage] for variant in chosen if storage in variant.forms), "")
    if by_code:  # never decoded: it dies with the op that reads the code
        return Swap(storage, problem.device_tier, last_forward + 1, last_forward + 1, len(problem.graph.ops), codec=by_code)
    sparse = "csr" if _feeds_conv(problem.graph, storage) and can_code(problem, "csr", storage) else ""
    codec = sparse or (dpr if can_code(problem, dpr, storage) else "")
    return Swap(storage, problem.device_tier, last_forward + 1, last_forward + 1, first_backward, codec=codec) if codec else None


def _feeds_conv(graph: Graph, storage: int) -> bool:
    return any(is_conv(graph.ops[op]) for op in forward_uses(graph, storage) if storage in graph.ops[op].reads)
