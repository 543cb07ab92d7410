import dataclasses

import pytest
from problems import chain
from reading import recomputed
from transformer import kept_for_backward, transformer

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import peak_bytes
from tierwise.policies import plan
from tierwise.simulate import simulate

CORE = ["scores", "softmax", "drop0"]


def plain(names: list[str]) -> list[str]:
    return [name.partition(".")[0] for name in names]


def test_the_bytes_of_the_paper():
    """Per layer and token × hidden: 34 + 5r, 34 with selective recomputation, 2 with full."""
    for r in (1, 4, 8):
        problem = transformer(layers=3, r=r)
        kept = {way: kept_for_backward(problem, plan(problem, "megatron", granularity=way, layers=3)) for way in ("none", "selective", "full")}
        assert kept == {"none": 3 * (34 + 5 * r), "selective": 3 * 34, "full": 3 * 2}


def test_selective_computes_the_inside_of_attention_again():
    problem = transformer(layers=2)
    schedule = plan(problem, "megatron", granularity="selective")
    assert recomputed(problem, schedule) == [f"{name}.{layer}" for layer in (1, 0) for name in CORE]  # ·V is not needed again
    assert simulate(problem, schedule).seconds == simulate(problem, plan(problem, "keep_all")).seconds + 2 * (1 + 0.25 + 0.25)


def test_q_and_k_may_be_views_of_one_storage():
    problem = transformer(layers=1)
    q, k = (next(s.id for s in problem.graph.storages if s.name == name) for name in ("q.0", "k.0"))
    ops = tuple(dataclasses.replace(op, reads=tuple(dict.fromkeys(q if s == k else s for s in op.reads))) for op in problem.graph.ops)
    problem = dataclasses.replace(problem, graph=dataclasses.replace(problem.graph, ops=ops))
    assert recomputed(problem, plan(problem, "megatron", granularity="selective", modules="core_attn")) == [f"{name}.0" for name in CORE]


def test_a_fused_kernel_leaves_norms_and_activation_functions():
    problem = transformer(layers=1, fused=True)
    schedule = plan(problem, "megatron", granularity="selective")
    assert recomputed(problem, schedule) == ["gelu.0", "norm2.0", "norm1.0"]
    assert kept_for_backward(problem, schedule) == 34 - 2 - 2 - 8


def test_block_recomputes_the_first_layers_and_uniform_runs_of_them():
    problem = transformer(layers=4)
    first_two = plan(problem, "megatron", granularity="full", method="block", layers=2)
    assert {name.partition(".")[2] for name in recomputed(problem, first_two)} == {"0", "1"}
    assert kept_for_backward(problem, first_two) == 2 * 2 + 2 * (34 + 5 * 4)
    in_pairs = plan(problem, "megatron", granularity="full", method="uniform", layers=2)
    assert kept_for_backward(problem, in_pairs) == 2 * 2  # x and what the second layer hands to the third


def test_auto_takes_the_first_that_fits():
    problem = transformer(layers=4)

    def planned(peak: int) -> list[str]:
        return recomputed(problem, plan(problem.with_budget(peak), "megatron"))

    peaks = {
        way: peak_bytes(problem, plan(problem, "megatron", granularity=way, layers=4))["hbm"] for way in ("none", "selective", "full")
    }  # fmt: skip
    assert peaks["none"] > peaks["selective"] > peaks["full"]
    assert planned(peaks["none"]) == []
    assert set(plain(planned(peaks["none"] - 1))) == set(CORE)
    assert set(plain(planned(peaks["selective"]))) == set(CORE)
    assert "up" in plain(planned(peaks["selective"] - 1))
    three = peak_bytes(problem, plan(problem, "megatron", granularity="full", layers=3))["hbm"]
    assert plain(planned(three)).count("up") == 3
    assert three == peaks["full"]  # backward begins with the last layer: to compute it again saves nothing


def test_the_least_budget_is_that_of_the_best_run():
    problem = transformer(layers=9)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(30), "megatron")
    runs = [peak_bytes(problem, plan(problem, "megatron", granularity="full", method="uniform", layers=n))["hbm"] for n in range(1, 8)]
    assert caught.value.least_bytes == min(runs)


def test_unknown_words():
    with pytest.raises(BadInput, match="granularity is 'some'; megatron knows auto, none, selective, full"):
        plan(chain(2), "megatron", granularity="some")
    with pytest.raises(BadInput, match="module 'mlp'; megatron knows core_attn, layernorm, activation"):
        plan(chain(2), "megatron", modules="mlp")
    with pytest.raises(BadInput, match="layers is 0; give at least 1"):
        plan(chain(2), "megatron", layers=0)
