"""Training steps under a budget of device memory, beside what people would use today, all in one run.

Peaks are of allocated bytes; the allocator's reserved bytes are capped at the budget for our rows, so a plan that does not hold it fails. "blocks
compiled, keep" compiles each block once and keeps what the compiler keeps: the fastest way there is, and the baseline. "without the runtime" is our
choice `keep` called directly: what is left between the two is the runtime's own cost.

    python -m benchmarks activations:llama-24x2048 activations:vit-large-16 --machine h200
    python -m benchmarks.cases.activations --one llama-24x2048 29GB --steps 3
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.processes import Process

NEEDS = "cuda"
BASELINE = "blocks compiled, keep"
# layers, hidden, batch, tokens of a Llama; or a zoo name and a batch. Budgets: bytes, or a share of what keeping everything takes, or "checkpoint":
# what checkpointing every block takes.
CASES: dict[str, dict[str, Any]] = {
    "llama-24x2048": {
        "llama": (24, 2048, 8, 2048),
        "peers": ["keep", "half", "checkpoint", "input offload", "eager", "eager checkpoint"],
        "budgets": ["45GB", "29GB", "20GB", "16.3GB", "14GB"],
    },
    "llama-4x8192": {"llama": (4, 8192, 8, 2048), "peers": ["keep", "checkpoint", "input offload"], "budgets": ["0.85", "checkpoint"]},
    "vit-large-16": {"zoo": ("vit-large-16", 384), "peers": ["keep", "checkpoint"], "budgets": ["0.34", "checkpoint"]},
    "resnet-152": {"zoo": ("resnet-152", 512), "peers": ["keep", "checkpoint"], "budgets": ["0.34", "checkpoint"]},
}
PARTS = tuple(CASES)
PEERS = ["keep", "half", "checkpoint", "input offload", "eager", "eager checkpoint"]
WARM_UPS, STEPS = 3, 8
LEAST_SECONDS = 4.0  # of timed steps: a pause of the host is no part of a short one
SETTLED = 20  # warm steps of ours: until then a plan may be made again with what was measured


def run(case: str) -> Iterator[dict[str, Any]]:
    rows = []
    for peer in CASES[case]["peers"]:
        for row in _process(["--peer", case, peer]):
            rows.append(row)
            yield row
    kept = next((row["peak_bytes"] for row in rows if row["way"] == BASELINE), None)
    checkpointed = next((row["peak_bytes"] for row in rows if row["way"] == "blocks compiled, checkpoint"), None)
    budgets = []
    for budget in CASES[case]["budgets"]:
        if budget == "checkpoint":
            budgets += [str(checkpointed)] if checkpointed else []
        elif budget.startswith("0.") and kept:
            budgets.append(str(int(float(budget) * kept)))
        elif not budget.startswith("0."):
            budgets.append(budget)
    yield from _process(["--one", case, *budgets])


def _process(arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Each way in a process of its own; ours share one, as a user's second fit does."""
    process = Process([sys.executable, "-m", "benchmarks.cases.activations", *arguments], "ROW")
    found = False
    for row in process:
        found = True
        print({name: value for name, value in row.items() if name != "plan"}, flush=True)
        yield row
    if not found or process.code:
        print(arguments, process.code, process.talk[-2000:], file=sys.stderr, flush=True)


# -- in a process of its own ------------------------------------------------------------------------------------------------------------


class _Training:
    def __init__(self, case: str) -> None:
        import torch

        self.case = case
        torch.manual_seed(0)
        self.model, self.batch, self.blocks = _model(CASES[case])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> Any:
        loss = _loss(self.model(**self.batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def measure(self, way: str, steps: int, warm_ups: int = WARM_UPS, **fields: Any) -> dict[str, Any]:
        import torch

        start = time.perf_counter()
        first_loss = float(self.step())
        first_seconds = time.perf_counter() - start
        for _ in range(warm_ups - 1):  # the loop that is timed below: what learns from it shall learn from the same
            self.step()
        torch.cuda.synchronize()
        warm_seconds = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        seconds = self._seconds_of(steps)
        if seconds * steps < LEAST_SECONDS:
            seconds = self._seconds_of(math.ceil(LEAST_SECONDS / seconds))
        return {
            "case": self.case,
            "way": way,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "seconds": seconds,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "first_step_seconds": first_seconds,  # with everything that is made before it
            "warm_up_seconds": warm_seconds,
            "first_loss": first_loss,
            **fields,
        }

    def _seconds_of(self, steps: int) -> float:
        """One of so many, together: what one leaves to be done may be done under the next."""
        import torch

        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def _model(case: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Any]]:
    import torch

    if "llama" in case:
        from transformers import LlamaConfig, LlamaForCausalLM

        layers, hidden, batch, tokens = case["llama"]
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=int(hidden * 2.75), num_hidden_layers=layers, num_attention_heads=hidden // 128,
            vocab_size=32000, use_cache=False, max_position_embeddings=tokens,
        )  # fmt: skip
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
            ids = torch.randint(0, 32000, (batch, tokens))
        return model, {"input_ids": ids, "labels": ids}, list(model.model.layers)
    from tierwise import zoo

    name, samples = case["zoo"]
    with torch.device("cuda"):
        found = zoo.resolve(name, batch=samples, dtype="bf16")
    model = found.model.cuda().train()
    batch = {key: value.cuda() for key, value in found.batch.items()}
    blocks = list(model.blocks) if hasattr(model, "blocks") else [block for stage in model.stages for block in stage]
    return model, batch, blocks


def _loss(output: Any) -> Any:
    return output.loss if hasattr(output, "loss") else output


def _peer(case: str, peer: str, steps: int) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    training = _Training(case)
    compiled = not peer.startswith("eager")
    torch._dynamo.config.recompile_limit = 64  # a net with many kinds of block shall not fall back to eager behind the eighth
    offload = _InputOffload()
    for index, block in enumerate(training.blocks):
        forward = torch.compile(block.forward) if compiled else block.forward
        if peer.endswith("checkpoint") or (peer == "half" and index < len(training.blocks) // 2):
            block.forward = functools.partial(_checkpointed, checkpoint, forward)
        elif peer == "input offload":
            block.forward = offload.wrap(index, forward)
        else:
            block.forward = forward
    if compiled and hasattr(training.model, "lm_head"):
        training.model.lm_head.compile()
        training.model.model.norm.compile()
    print("ROW", json.dumps(training.measure(f"blocks compiled, {peer}" if compiled else peer, steps)), flush=True)


def _checkpointed(checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class _InputOffload:
    """Checkpoint each block; its input waits in pinned memory and comes back two blocks before its backward."""

    def __init__(self) -> None:
        import torch

        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.pool: dict[int, Any] = {}
        self.waiting: dict[int, dict[str, Any]] = {}

    def wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch.utils.checkpoint import checkpoint

        def pack(tensor: Any) -> Any:
            if tensor.nbytes < 1 << 20 or not tensor.is_contiguous() or index in self.waiting:
                return tensor
            host = self.pool.get(index)
            if host is None:
                host = self.pool[index] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.out):
                host.copy_(tensor, non_blocking=True)
                sent = torch.cuda.Event()
                sent.record()
            self.waiting[index] = {"host": host, "source": tensor, "sent": sent, "device": None}
            return index

        def unpack(item: Any) -> Any:
            if not isinstance(item, int):
                return item
            for ahead in (item, item - 1, item - 2):
                self.fetch(ahead)
            slot = self.waiting.pop(item)
            torch.cuda.current_stream().wait_event(slot["ready"])
            return slot["device"]

        def call(*args: Any, **kwargs: Any) -> Any:
            for slot in [self.waiting[i] for i in self.waiting if i < index - 1 and self.waiting[i]["source"] is not None]:
                torch.cuda.current_stream().wait_event(slot["sent"])
                slot["source"] = None
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return call

    def fetch(self, index: int) -> None:
        import torch

        slot = self.waiting.get(index)
        if slot is None or slot["device"] is not None:
            return
        slot["device"] = torch.empty_like(slot["host"], device="cuda")
        self.back.wait_stream(torch.cuda.current_stream())
        self.back.wait_event(slot["sent"])
        with torch.cuda.stream(self.back):
            slot["device"].copy_(slot["host"], non_blocking=True)
            slot["ready"] = torch.cuda.Event()
            slot["ready"].record()


def _ours(case: str, budgets: list[str], steps: int) -> None:
    import torch

    from tierwise.fitting import fit, fitted_of, plan_of, release
    from tierwise.units import parse_bytes

    training = _Training(case)
    told = _Told()
    logging.getLogger("tierwise").addHandler(told)
    capacity = torch.cuda.get_device_properties(0).total_memory
    for number, budget in enumerate(budgets):
        nbytes = parse_bytes(int(budget) if budget.isdigit() else budget)
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / capacity))
        told.sentences.clear()
        start = time.perf_counter()
        stages: dict[str, str] = {}  # what began when, for readers of the file

        def tell(what: str, start: float = start, stages: dict[str, str] = stages) -> None:
            stages[f"{time.perf_counter() - start:.1f} s"] = what

        try:
            fit(training.model, training.optimizer, budget=nbytes, progress=tell)
            row = training.measure("tierwise", steps, SETTLED, budget_bytes=nbytes)
        except Exception as error:
            print(
                "ROW", json.dumps({"case": case, "way": "tierwise", "budget_bytes": nbytes, "failed": f"{type(error).__name__}: {error}"}), flush=True
            )
            torch.cuda.set_per_process_memory_fraction(1.0)  # what comes back may take more than the budget
            release(training.model)
            _forget(training)
            continue
        plan, fitted = plan_of(training.model), fitted_of(training.model)
        counts = fitted.session.copies.counts()
        passes = fitted.meter.steps
        row |= {
            "predicted_seconds": plan.predicted.seconds,
            "predicted_peak_bytes": plan.peak_bytes,
            "stages": stages,
            "sent_bytes": counts.sent_bytes // passes,
            "exposed_seconds": counts.exposed_seconds / passes,
            "retries": fitted.session.retries,
            "corrections": plan.corrections,
            "said": [*sorted(fitted.session.events.said), *told.sentences],
            "plan": plan.words(),
        }
        print("ROW", json.dumps(row), flush=True)
        torch.cuda.set_per_process_memory_fraction(1.0)  # what comes back may take more than the budget
        if number == 0 and not counts.sent_bytes:  # what is sent would stay, without the runtime
            codes = {module: plan.plans[module, 0].forward for module, _ in plan.plans}
            release(training.model)
            print("ROW", json.dumps(_bare(training, codes, steps)), flush=True)
        else:
            release(training.model)
        _forget(training)


class _Told(logging.Handler):
    """What the runtime tells its users."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


def _bare(training: _Training, codes: dict[str, Any], steps: int) -> dict[str, Any]:
    """The same compiled choices called directly."""
    from tierwise.fitting.losses import adopt_losses, give_back_losses

    losses = adopt_losses(training.model)
    modules = {name: training.model.get_submodule(name) for name in codes}
    for name, module in modules.items():
        module.__dict__["forward"] = functools.partial(codes[name], module)
    try:
        return training.measure("the same code without the runtime", steps)
    finally:
        for module in modules.values():
            del module.__dict__["forward"]
        give_back_losses(losses)


def _forget(training: _Training) -> None:
    import torch

    training.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--one", nargs="+", metavar=("CASE", "BUDGET"), help="our rows of a case at these budgets")
    parser.add_argument("--peer", nargs=2, metavar=("CASE", "PEER"), help=f"one row of a case: {', '.join(PEERS)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    if given.one:
        _ours(given.one[0], given.one[1:], given.steps)
    elif given.peer:
        _peer(*given.peer, given.steps)
    else:
        parser.error("say --one or --peer; the whole case is python -m benchmarks activations --machine NAME")
