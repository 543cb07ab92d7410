"""The codecs of the papers, for problems that bring none of their own: which storages have which form, how small, and how fast.

Sizes follow from what a storage holds, and that from the op that made it: there is no data here to look at. A ReLU's output is as dense as cDMA found
on average, whose abstract gives a compression of 2.6 for a mask bit and the words that are not zero: 32 / (1 + 32 d) = 2.6 at d = 0.35. Max pooling
k values keeps a zero only if all k are zero, counted as if neighbours were independent, so pooled maps come out denser than they are. Everything
else counts as dense. Measured densities belong into Costs.codecs, and then these are not used.

Rates are those of passes over memory, as a fused kernel reaches them. Ours reach on an H200 (benchmarks/results/h200/2026-11-16-codecs.json), out
and back: of fp32, zvc 0.77 and 0.82 of that, csr 0.52 and 0.36, fp16 0.77 and 1.1, fp8 0.64 and 1.2, packing signs 1.2; of bf16, zvc 0.62 and
0.65, csr 0.26 and 0.21, fp8 0.65 and 0.83, signs 1.1. Sizes are within a thousandth of the measured ones. Measured rates belong into Costs.codecs,
too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..ir import Codec, Costs, Graph, Op, Phase, Problem, Role, Variant

RELU_DENSITY = 0.35
KERNEL_SHARE = 0.75  # of the memory's bandwidth, as in profile/roofline.py
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp64": 8}
INDEX_BYTES = 8  # of torch's int64 indices of max pooling


@dataclass(frozen=True, slots=True)
class Content:
    """What is known of the values in a storage."""

    elements: int
    element_bytes: int
    density: float  # of values that are not zero


def contents(graph: Graph) -> dict[int, Content]:
    """What activations hold that forward writes, by the kind of op that made them; storages of unknown content are missing."""
    found: dict[int, Content] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.precision in ELEMENT_BYTES:
            for storage in op.writes:
                made = graph.storages[storage]
                if made.role is Role.ACTIVATION and made.nbytes and not is_pool_index(graph, storage):
                    size = ELEMENT_BYTES[op.precision]
                    found[storage] = Content(made.nbytes // size, size, _density(graph, op, storage, found))
    return found


def _density(graph: Graph, op: Op, made: int, known: Mapping[int, Content]) -> float:
    if op.kind == "relu":
        return RELU_DENSITY
    parts = [(graph.storages[s].nbytes, known[s].density if s in known else 1.0) for s in op.reads if graph.storages[s].role is Role.ACTIVATION]
    whole = sum(nbytes for nbytes, _ in parts)
    if op.kind == "max_pool2d" and whole:
        window = max(1.0, whole / graph.storages[made].nbytes)
        return 1.0 - float((1 - parts[0][1]) ** window)
    if op.kind == "cat" and whole:
        return sum(nbytes * density for nbytes, density in parts) / whole
    return 1.0


def is_pool_index(graph: Graph, storage: int) -> bool:
    """The places of the maxima, which torch keeps as a second output of max pooling."""
    producer = graph.producer(storage)
    return producer is not None and graph.ops[producer].kind == "max_pool2d" and graph.ops[producer].writes[1:2] == (storage,)


# -- sizes ------------------------------------------------------------------------------------------------------------------------------


def zvc_bytes(content: Content) -> int:
    """Zero-value compression: a bit for each value, and the values that are not zero."""
    return -(-content.elements // 8) + round(content.elements * content.density) * content.element_bytes


def csr_bytes(content: Content) -> int:
    """Gist's narrow rows of 256: a byte for the column of each value that is not zero, the value, and two bytes a row for their number."""
    return round(content.elements * content.density) * (1 + content.element_bytes) + 2 * -(-content.elements // 256)


def narrowed_bytes(content: Content, bits: int) -> int:
    return -(-content.elements * bits // 8)


ROUNDED = {"fp16": 16, "fp10": 10, "fp8": 8}  # Gist's delayed precision reduction, bits a value
_PASSES = {"zvc": (2.0, 1.0), "csr": (2.0, 1.0), "bit1": (1.0, 0.0), "argmax4": (1.0, 1.0), "fp16": (1.0, 1.0), "fp10": (1.0, 1.0), "fp8": (1.0, 1.0)}
# Over the plain bytes, to encode and to decode, beside one over the encoded bytes: what packs is first counted.


def with_codecs(problem: Problem, names: Iterable[str], *, most: float = 0.95) -> Problem:
    """The problem with these codecs, where it does not bring them; a storage has a form only if that is smaller than `most` of it."""
    missing = [name for name in names if name not in problem.costs.codec_named]
    if not missing:
        return problem
    graph, known = problem.graph, contents(problem.graph)
    codecs = list(problem.costs.codecs)
    for name in missing:
        sizes = {storage: nbytes for storage, nbytes in _sizes(graph, known, name) if nbytes < most * graph.storages[storage].nbytes}
        encode, decode = _rates(problem, name, sizes)
        codecs.append(Codec(name, sizes, encode, decode, lossy=name in ROUNDED))
    return replace(problem, costs=replace(problem.costs, codecs=tuple(codecs)))


def _sizes(graph: Graph, known: Mapping[int, Content], name: str) -> Iterable[tuple[int, int]]:
    if name == "argmax4":  # four bits say which of up to sixteen values of a window was the largest
        places = [storage for storage in graph.storages if is_pool_index(graph, storage.id)]
        yield from ((storage.id, -(-storage.nbytes // INDEX_BYTES // 2)) for storage in places)
        return
    for storage, content in known.items():
        if name == "zvc":
            yield storage, zvc_bytes(content)
        elif name == "csr":
            yield storage, csr_bytes(content)
        elif name == "bit1":
            if graph.ops[graph.writers[storage][0]].kind == "relu":
                yield storage, narrowed_bytes(content, 1)
        else:
            yield storage, narrowed_bytes(content, ROUNDED[name])


def _rates(problem: Problem, name: str, sizes: Mapping[int, int]) -> tuple[dict[str, float], dict[str, float]]:
    """Plain bytes a second, encoding and decoding, on each processor that says how fast its memory is."""
    plain = sum(problem.graph.storages[storage].nbytes for storage in sizes)
    share = sum(sizes.values()) / plain if plain else 1.0
    to_encode, to_decode = _PASSES[name]
    rates = {p.name: p.bytes_per_second * KERNEL_SHARE for p in problem.machine.processors if p.bytes_per_second}
    encode = {processor: rate / (to_encode + share) for processor, rate in rates.items()}
    decode = {processor: rate / (to_decode + share) for processor, rate in rates.items()} if to_decode else {}
    return encode, decode


def can_code(problem: Problem, name: str, storage: int, *, on: str | None = None) -> bool:
    """Whether a processor, the device unless named, turns the storage into this form and back."""
    codec = problem.costs.codec_named.get(name)
    processor = on or problem.machine.device.name
    return (
        codec is not None
        and storage in codec.encoded_bytes
        and processor in codec.encode_bytes_per_second
        and processor in codec.decode_bytes_per_second
    )


# -- what backward can do with less -----------------------------------------------------------------------------------------------------


def with_variants_on_codes(problem: Problem) -> Problem:
    """Gist's two: a ReLU's backward needs the signs of its output, max pooling's the places of the maxima and neither input nor output."""
    graph, codecs, device = problem.graph, problem.costs.codec_named, problem.machine.device.name
    found = []
    for op in graph.ops:
        if (op.id, device) not in problem.costs.op_seconds:
            continue
        seconds = {device: problem.seconds(op.id, device)}
        if op.kind == "relu_backward":
            signs = [s for s in op.reads if s in codecs["bit1"].encoded_bytes] if "bit1" in codecs else []
            if signs:
                found.append(Variant(op.id, "from signs", seconds, op.workspace_bytes, forms=dict.fromkeys(signs, "bit1")))
        elif op.kind == "max_pool2d_backward":
            places = [s for s in op.reads if is_pool_index(graph, s)]
            read = tuple(s for s in op.reads if s in places or _is_gradient(graph, s))
            forms = {s: "argmax4" for s in places if "argmax4" in codecs and s in codecs["argmax4"].encoded_bytes}
            if places and (forms or read != op.reads):
                found.append(Variant(op.id, "from places", seconds, op.workspace_bytes, read, forms))
    known = problem.costs.variant_of
    variants = (*problem.costs.variants, *(variant for variant in found if (variant.op, variant.name) not in known))
    return replace(problem, costs=Costs(problem.costs.op_seconds, problem.costs.codecs, variants))


def _is_gradient(graph: Graph, storage: int) -> bool:
    producer = graph.producer(storage)
    return producer is not None and graph.ops[producer].phase is not Phase.FORWARD
