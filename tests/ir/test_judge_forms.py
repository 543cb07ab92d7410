"""Each rule of the judge on encoded copies and on variants of ops, by a schedule that breaks it."""

from __future__ import annotations

import dataclasses

import pytest
from interpreter import run_program, run_schedule
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine, with_codecs, with_engines, with_sign_bits

from tierwise.errors import InvalidSchedule
from tierwise.ir import Codec, Compute, Copy, Costs, Free, Problem, Role, Schedule, Variant, check_schedule, peak_bytes
from tierwise.ir.judge import choice_faults
from tierwise.policies import keep_all

# chain(2): storages 0 batch, 1 a0, 2 a1, 3 d1, 4 d0; ops 0 fwd0, 1 fwd1, 2 loss, 3 bwd1, 4 bwd0. Encoded, a0 takes 5 of its 10 bytes.
BATCH, A0, A1, D1, D0 = range(5)
HOME = {BATCH: ("hbm",)}
PROBLEM = with_codecs(chain(2))
TAIL = (Compute(3), Free(A0, "hbm"), Free(D1, "hbm"), Compute(4), Free(BATCH, "hbm"), Free(D0, "hbm"))
ENCODE, DECODE = Copy(A0, "hbm", "hbm", dst_form="half"), Copy(A0, "hbm", "hbm", src_form="half")
IN_PLACE = (
    Compute(0), Compute(1), ENCODE, Free(A0, "hbm"), Compute(2), Free(A1, "hbm"), DECODE, Free(A0, "hbm", form="half"), *TAIL,
)  # fmt: skip


def judge(steps, *, problem: Problem = PROBLEM) -> None:
    check_schedule(problem, Schedule(tuple(steps), HOME))


def refused(steps, match: str, **more) -> None:
    with pytest.raises(InvalidSchedule, match=match):
        judge(steps, **more)


def test_held_encoded_between_two_uses():
    judge(IN_PLACE)
    # At the encoding: batch, a0, a1 and 5 bytes; at the loss: batch, 5 bytes, a1 and d1; at bwd1: batch, a0, d1 and d0.
    assert peak_bytes(PROBLEM, Schedule(IN_PLACE, HOME)) == {"hbm": 40, "dram": 0, "nvme": 0}
    assert peak_bytes(PROBLEM, Schedule((*IN_PLACE[:5], Free(A1, "hbm"), Free(D1, "hbm")), HOME))["hbm"] == 35


def test_no_op_reads_what_is_encoded():
    refused([*IN_PLACE[:6], *TAIL], r"bwd1 runs on gpu and reads a0 \(10 B\), which is in hbm as half, not in hbm")


def test_encoded_bytes_go_over_any_link_as_they_are():
    there, back = Copy(A0, "hbm", "nvme", src_form="half", dst_form="half"), Copy(A0, "nvme", "hbm", src_form="half", dst_form="half")
    steps = (*IN_PLACE[:4], there, Free(A0, "hbm", form="half"), *IN_PLACE[4:6], back, Free(A0, "nvme", form="half"), *IN_PLACE[6:])
    judge(steps)
    assert peak_bytes(PROBLEM, Schedule(steps, HOME))["nvme"] == 5


def test_a_link_encodes_only_if_it_has_an_engine():
    out, back = Copy(A0, "hbm", "dram", dst_form="half"), Copy(A0, "dram", "hbm", src_form="half")
    steps = (*IN_PLACE[:2], out, *IN_PLACE[3:6], back, Free(A0, "dram", form="half"), *TAIL)
    refused(steps, "the link from hbm to dram has no engine for half; encode or decode a0 .* at one of its ends")
    problem = dataclasses.replace(PROBLEM, machine=with_engines(PROBLEM.machine))
    judge(steps, problem=problem)
    assert peak_bytes(problem, Schedule(steps, HOME))["dram"] == 5


def test_codecs_are_known_and_fit():
    refused([Compute(0), dataclasses.replace(ENCODE, dst_form="zip")], "there is no codec 'zip'; the problem has half, tenth")
    refused([Compute(0), ENCODE], "there is no codec 'half'; the problem has none", problem=chain(2))
    refused([Compute(0), dataclasses.replace(ENCODE, src="moon", dst="moon")], "there is no tier 'moon'")
    refused([Compute(0), Copy(A0, "hbm", "hbm")], "copy of a0 .* to hbm, where it already is")
    only_batch = dataclasses.replace(PROBLEM, costs=dataclasses.replace(PROBLEM.costs, codecs=(Codec("half", {BATCH: 5}, {"gpu": 1.0}),)))
    refused([Compute(0), ENCODE], r"a0 \(10 B\) has no form half", problem=only_batch)


def test_only_a_processor_that_works_there_and_knows_how_encodes_and_decodes():
    away = (Compute(0), Copy(A0, "hbm", "dram"))
    one_way = dataclasses.replace(PROBLEM, costs=dataclasses.replace(PROBLEM.costs, codecs=(Codec("half", {A0: 5}, {"gpu": 1.0}),)))
    refused([*away, Copy(A0, "dram", "dram", dst_form="half")], "no processor that works in dram can encode half; gpu can", problem=one_way)
    refused(IN_PLACE, "no processor that works in hbm can decode half; none can", problem=one_way)
    refused([Compute(0), Copy(A0, "hbm", "nvme"), Copy(A0, "nvme", "nvme", dst_form="half")], "no processor that works in nvme can encode half")


def test_codecs_do_not_follow_on_each_other():
    refused([*IN_PLACE[:3], Copy(A0, "hbm", "hbm", src_form="half", dst_form="tenth")], "goes from half to tenth in hbm; one of them must be plain")
    refused([*IN_PLACE[:3], Copy(A0, "hbm", "dram", src_form="half", dst_form="tenth")], "goes from half to tenth; decode it first")


def test_pages_are_not_encoded():
    refused([Compute(0), Copy(A0, "hbm", "dram", fault=True, src_form="half", dst_form="half")], "cannot be faulted in as half")


def test_what_is_not_there():
    refused([Compute(0), DECODE], "copy of a0 .* from hbm as half, where it is not")
    refused([Compute(0), Free(A0, "hbm", form="half")], "free of a0 .* in hbm as half, where it is not")
    refused([*IN_PLACE[:3], ENCODE], "copy of a0 .* to hbm as half, where it already is")


def test_what_is_overwritten_leaves_its_encoded_bytes_out_of_date():
    problem, w0 = chain(1, weight_bytes=6), 1
    problem = dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, (Codec("half", {w0: 3}, {"gpu": 1.0}, {"gpu": 1.0}),)))
    legal, encode, decode = keep_all.plan(problem), Copy(w0, "hbm", "hbm", dst_form="half"), Copy(w0, "hbm", "hbm", src_form="half")

    def steps(*steps):
        check_schedule(problem, dataclasses.replace(legal, steps=steps))

    steps(encode, *legal.steps, Free(w0, "hbm", form="half"))
    with pytest.raises(InvalidSchedule, match=r"copy of w0 .* from hbm as half, where it is out of date"):
        steps(encode, *legal.steps, decode)
    with pytest.raises(InvalidSchedule, match=r"w0 .* is still in hbm as half at the end, away from home"):
        steps(encode, *legal.steps)


def test_nothing_encoded_piles_up():
    refused([*IN_PLACE[:7], *IN_PLACE[8:]], r"a0 \(10 B\) of an earlier step is still in hbm as half: every step would leave more behind")


def test_addresses_of_encoded_bytes():
    cold = dataclasses.replace(with_codecs(chain(2, on=machine(hbm=45))), cyclic=False)
    good = {(-1, BATCH): 0, (0, A0): 10, (1, A1): 20, (2, A0): 40, (4, D1): 10, (6, A0): 20, (8, D0): 30}
    check_schedule(cold, Schedule(IN_PLACE, HOME, good))
    with pytest.raises(InvalidSchedule, match=r"a0 .* at addresses 15 to 20 overlaps the live range 10 to 20"):
        check_schedule(cold, Schedule(IN_PLACE, HOME, good | {(2, A0): 15}))  # the plain bytes are still there
    with pytest.raises(InvalidSchedule, match=r"a0 .* at address 41 ends at 46, outside hbm"):
        check_schedule(cold, Schedule(IN_PLACE, HOME, good | {(2, A0): 41}))


# -- variants ---------------------------------------------------------------------------------------------------------------------------

PLAIN = (Compute(0), Compute(1), Compute(2), Free(A1, "hbm"), *TAIL)


def chosen(*variants: Variant, problem: Problem | None = None) -> Problem:
    problem = problem or chain(2)
    return dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, variants=variants))


def test_a_variant_has_a_workspace_of_its_own():
    problem = chosen(Variant(0, "fft", {"gpu": 0.5}, workspace_bytes=25))
    steps = (Compute(0, variant="fft"), *PLAIN[1:])
    judge(steps, problem=problem)
    assert peak_bytes(problem, Schedule(steps, HOME))["hbm"] == 45  # batch, a0 and 25
    assert peak_bytes(problem, Schedule(PLAIN, HOME))["hbm"] == 40


def test_variants_are_known_and_run_where_they_can():
    problem = chosen(Variant(0, "fft", {"gpu": 0.5}))
    refused([Compute(0, variant="gemm")], "fwd0 runs by 'gemm'; it has fft", problem=problem)
    refused([Compute(0), Compute(1, variant="fft")], "fwd1 runs by 'fft'; it has no variants", problem=problem)
    refused([Compute(0, "cpu", variant="fft")], "fwd0 by fft has no cost on cpu", problem=problem)


def test_a_variant_reads_what_it_says():
    # bwd1 can do with fwd1's output instead of its input.
    problem = chosen(Variant(3, "from output", {"gpu": 1.0}, reads=(D1, A1)))
    steps = (Compute(0), Compute(1), Free(A0, "hbm"), Compute(2), Compute(3, variant="from output"), Free(A1, "hbm"), *TAIL[2:])
    judge(steps, problem=problem)
    assert run_schedule(problem, Schedule(steps, HOME), 2) == run_program(problem.graph, 2)
    refused([*steps[:4], Free(A1, "hbm"), *steps[4:]], r"bwd1 by from output reads a1 \(10 B\) after it was freed", problem=problem)


def test_a_variant_needs_the_version_its_op_would_have_met():
    problem = chain(1, weight_bytes=6)
    problem = chosen(Variant(0, "other", {"gpu": 1.0}, reads=problem.graph.ops[0].reads), problem=problem)
    legal = keep_all.plan(problem)
    check_schedule(problem, dataclasses.replace(legal, steps=(Compute(0, variant="other"), *legal.steps[1:])))
    batch_freed = legal.steps.index(Free(0, "hbm"))
    late = (*legal.steps[:batch_freed], *legal.steps[batch_freed + 1 :], Compute(0, variant="other"), Free(2, "hbm"), Free(0, "hbm"))
    with pytest.raises(InvalidSchedule, match=r"fwd0 by other needs w0 .* as it was after write 0.*: it was overwritten since"):
        check_schedule(problem, dataclasses.replace(legal, steps=late))


def test_a_variant_can_read_what_is_encoded():
    b = GraphBuilder()
    x, y, d, g = (b.storage(name, 16, role) for name, role in zip("xydg", (Role.INPUT, *[Role.ACTIVATION] * 3), strict=True))
    b.op("relu", FORWARD, [x], [y], kind="relu")
    b.op("loss", BACKWARD, [y], [d], kind="loss")
    b.op("relu'", BACKWARD, [d, y], [g], kind="relu_backward")
    problem, home = with_sign_bits(b.problem()), {x: ("hbm",)}
    steps = (
        Compute(0), Free(x, "hbm"), Compute(1), Copy(y, "hbm", "hbm", dst_form="sign"), Free(y, "hbm"), Compute(2, variant="signs"),
        Free(y, "hbm", form="sign"), Free(d, "hbm"), Free(g, "hbm"),
    )  # fmt: skip
    check_schedule(problem, Schedule(steps, home))
    assert run_schedule(problem, Schedule(steps, home), 2) == run_program(problem.graph, 2)
    with pytest.raises(InvalidSchedule, match=r"relu' by signs runs on gpu and reads y .*, which is in hbm, not in hbm as sign"):
        check_schedule(problem, Schedule((*steps[:3], *steps[5:]), home))
    with pytest.raises(InvalidSchedule, match="no processor that works in hbm can decode sign"):
        check_schedule(problem, Schedule((*steps[:5], Copy(y, "hbm", "hbm", src_form="sign"), *steps[5:]), home))


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        ({"codecs": (Codec("a", {}), Codec("a", {}))}, "two codecs have the same name"),
        ({"codecs": (Codec("", {}),)}, "a codec has no name"),
        ({"codecs": (Codec("a", {77: 1}),)}, "codec a names storage 77; there are 5"),
        ({"variants": (Variant(0, "v", {}), Variant(0, "v", {}))}, "two variants of an op have the same name"),
        ({"variants": (Variant(9, "v", {}),)}, "variant 'v' is of op 9; it needs a name, and there are 5 ops"),
        ({"variants": (Variant(0, "v", {}, reads=(50,)),)}, "variant v of fwd0 reads storage 50; there are 5"),
        ({"variants": (Variant(0, "v", {}, forms={BATCH: "zip"}),)}, "variant v of fwd0 takes storage 0 as 'zip'"),
        ({"variants": (Variant(0, "v", {"gpu": -1.0}),)}, "variant v of fwd0 takes less than 0 seconds or bytes"),
    ],
)
def test_choices_that_make_no_sense(costs, match):
    problem = chain(2)
    assert next(choice_faults(dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, **costs)))).startswith(match)


def test_choices_that_make_sense():
    assert not list(choice_faults(with_sign_bits(with_codecs(chain(4, kinds=("conv2d", "relu"))))))
