"""What is written is read back equal; what does not fit is refused in one sentence that says what was found."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path

import pytest
from problems import FORWARD, GraphBuilder, chain, machine, with_codecs, with_engines, with_sign_bits

from tierwise.errors import BadFile, ForeignFile, TierwiseError
from tierwise.ir import Compute, Copy, Free, Graph, Machine, Problem, Region, RegionCall, Role, Schedule, Timeline, check_schedule, serial
from tierwise.policies import plan
from tierwise.simulate import simulate


def full_graph() -> Graph:
    """A graph in which every field of every type is away from its default."""
    b = GraphBuilder()
    x, w = b.storage("x", 4, Role.INPUT), b.storage("w", 4, Role.PARAM)
    y, z = b.storage("y", 4, Role.ACTIVATION), b.storage("z", 4, Role.ACTIVATION)
    b.op("f", FORWARD, [x], [y], kind="matmul", region=0, workspace_bytes=7, replayable=False, flops=9, precision="bf16")
    b.op("g", FORWARD, [y], [z], mutates=(w,), in_place=((y, z),))
    return Graph(tuple(b.ops), tuple(b.storages), (Region(3, "block", "layers.0"),), (RegionCall(0, 3, "layers.0"),))


PROBLEM = chain(3, weight_bytes=4, state_bytes=8, cpu_update_seconds=2.0)
SCHEDULE = Schedule(
    (Compute(0), Compute(1, on="cpu", iteration=-1), Copy(2, "hbm", "dram", iteration=-1), Free(2, "hbm", join=True), Free(1, "dram", iteration=-1)),
    home={0: ("hbm",), 1: ("dram", "nvme")},
    addresses={(0, 2): 64, (-1, 0): 0},
)
CHOICES = dataclasses.replace(with_sign_bits(with_codecs(chain(4, kinds=("conv2d", "relu")))), machine=with_engines(machine()))
FORMS = Schedule((Compute(0, variant="fft"), Copy(2, "hbm", "dram", src_form="", dst_form="half"), Free(2, "hbm", form="half")), home={})
DOCUMENTS = [
    full_graph(),
    PROBLEM.graph,
    machine(),
    PROBLEM,
    CHOICES,
    SCHEDULE,
    FORMS,
    plan(PROBLEM, "keep_all"),
    simulate(PROBLEM, plan(PROBLEM, "keep_all")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_round_trip(document, suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    serial.save(document, path)
    assert serial.load(path, type(document)) == document
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_equal_documents_are_equal_bytes(tmp_path):
    for name in ("a.json.gz", "b.json.gz"):
        serial.save(PROBLEM, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_schedule_knows_its_graph():
    text = serial.dumps(SCHEDULE, graph=PROBLEM.graph)
    assert serial.loads(text, Schedule, graph=PROBLEM.graph) == SCHEDULE
    with pytest.raises(BadFile, match=r"made for another graph .* plan again"):
        serial.loads(text, Schedule, graph=chain(4).graph)


def test_the_fingerprint_sees_every_field():
    base = full_graph()
    seen = {serial.fingerprint(base)}
    for i, op in enumerate(base.ops):
        for field in op.__dataclass_fields__:
            if isinstance(value := getattr(op, field), int):
                changed = type(op)(**{f: getattr(op, f) for f in op.__dataclass_fields__} | {field: value + 1})
                seen.add(serial.fingerprint(Graph((*base.ops[:i], changed, *base.ops[i + 1 :]), base.storages, base.regions, base.calls)))
    assert len(seen) == 1 + 2 * len(("id", "region", "workspace_bytes", "replayable", "flops"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"tierwise": "graph", "format": 1', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"tierwise": "graph", "format": 2}', "format 2; this version reads format 1"),
        ('{"tierwise": "graph"}', "format None"),
        ('{"tierwise": "machine", "format": 1}', "this is a machine; expected a graph or problem"),
        ('{"tierwise": "graph", "format": 1}', "corrupt graph: 'ops' is missing"),
        ('{"tierwise": ["graph"], "format": 1}', "expected a graph or problem"),
    ],
)
def test_what_is_not_a_graph_is_refused(text, message):
    with pytest.raises(BadFile, match=message):
        serial.loads(text, (Graph, Problem))


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"kernels": []}'])
def test_other_peoples_json_is_foreign(text):
    with pytest.raises(ForeignFile, match="not a Tierwise file; expected a graph"):
        serial.loads(text, Graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["storages"][1].update(nbytes="12"), "nbytes of Storage w0 is '12', not int"),
        (lambda d: d["storages"][1].update(nbytes=1.5), "nbytes of Storage w0 is 1.5, not int"),
        (lambda d: d["storages"][1].update(role="weight"), "role of Storage w0 is 'weight', not Role"),
        (lambda d: d["storages"][1].update(colour="red"), "Storage has no 'colour'"),
        (lambda d: d["ops"][0].update(reads=[99]), "touches storage 99"),
        (lambda d: d["ops"][0].update(reads="ab"), "reads of Op fwd0 is 'ab'"),
        (lambda d: d["ops"].pop(0), "has id 1 and stands at place 0"),
        (lambda d: d["ops"][0].pop("phase"), "missing .* 'phase'"),
        (lambda d: d.update(ops=None), "corrupt graph"),
    ],
)
def test_a_corrupt_graph_says_what_is_wrong(change, message):
    data = json.loads(serial.dumps(PROBLEM.graph))
    change(data)
    with pytest.raises(BadFile, match=message):
        serial.loads(json.dumps(data), Graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["links"][0]["lanes"].update(out=0), "lanes of Link"),
        (lambda d: d["links"][0].update(lanes={}), "every link needs a lane"),
        (lambda d: d["links"][0].update(staging_tier="attic"), "no tier named 'attic'"),
        (lambda d: d["tiers"][0].update(within="attic"), "no tier named 'attic'"),
        (lambda d: d["tiers"][0].update(capacity_bytes=-1), "below 0"),
        (lambda d: d["tiers"].append(d["tiers"][0]), "same name"),
        (lambda d: d["processors"].clear(), "needs a processor"),
        (lambda d: d["processors"][0].update(tier="attic"), "no tier named 'attic'"),
        (lambda d: d["processors"][0].update(bytes_per_second=float("nan")), "bytes_per_second of Processor gpu is nan"),
    ],
)
def test_a_corrupt_machine_says_what_is_wrong(change, message):
    data = json.loads(serial.dumps(machine()))
    change(data)
    with pytest.raises(BadFile, match=message):
        serial.loads(json.dumps(data), Machine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["op_seconds"]["gpu"].pop("0"), "exactly the ops"),
        (lambda d: d["op_seconds"].update(tpu={"0": 1.0}), "no processor named 'tpu'"),
        (lambda d: d["op_seconds"]["gpu"].update({"0": -1.0}), "less than 0"),
        (lambda d: d["op_seconds"]["gpu"].update({"0": "soon"}), "could not convert"),
    ],
)
def test_a_corrupt_problem_says_what_is_wrong(change, message):
    data = json.loads(serial.dumps(PROBLEM))
    change(data)
    with pytest.raises(BadFile, match=message):
        serial.loads(json.dumps(data), Problem)


def spoil(value, rng: random.Random):
    """The same JSON with one value somewhere replaced by one that does not belong there."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        return value | {key: spoil(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], spoil(value[at], rng), *value[at + 1 :]]
    return rng.choice([None, "x", -7, 10**30, 1.5, True, [], {}, [[]], {"a": 1}, float("nan"), float("inf")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_no_corruption_ends_in_anything_but_our_errors(document):
    """A spoiled file is refused, or it is a document that the judge can look at: never another exception."""
    data, rng = json.loads(serial.dumps(document)), random.Random(0)
    for _ in range(300):
        text = json.dumps(spoil(data, rng))
        try:
            found = serial.loads(text, type(document))
            if isinstance(found, Schedule):
                check_schedule(PROBLEM, found)
        except TierwiseError:
            pass


def test_bad_bytes_in_a_file_are_refused(tmp_path):
    path = tmp_path / "x.json"
    for data in (
        b"\xff\xfe\x00",
        b"\x1f\x8b garbage",
        gzip.compress(b"{}" * 1000)[:-20],
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff\xff",
    ):
        path.write_bytes(data)
        with pytest.raises(BadFile, match=r"x\.json"):
            serial.load(path, Graph)


def test_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path / "nothing.json", tmp_path, Path("a" * 300)):
        with pytest.raises(BadFile, match="cannot read"):
            serial.load(path, Graph)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(self, data):
        self.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadFile, match=r"cannot write .*x\.json: No space left on device"):
        serial.save(machine(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_device_is_written_to_and_never_replaced():
    with pytest.raises(BadFile, match="No space left"):
        serial.save(machine(), "/dev/full")
    assert Path("/dev/full").is_char_device()


def test_timelines_keep_their_spans_and_curves():
    timeline = DOCUMENTS[-1]
    assert isinstance(timeline, Timeline) and timeline.spans and timeline.memory["hbm"]
    assert serial.loads(serial.dumps(timeline), Timeline).busy_seconds() == timeline.busy_seconds()
