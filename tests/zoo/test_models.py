"""The zoo's own models: they have their published sizes, cost nothing on fake tensors, and train for real when tiny."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tierwise import zoo
from tierwise.errors import BadInput, UnknownName
from tierwise.zoo.catalogue import ENTRIES
from tierwise.zoo.mixtral import Experts

TINY = [name for name in zoo.names() if name.endswith("-tiny")]

# Published counts. gpt2, llama, qwen, mixtral, t5: the checkpoints; bert with both pre-training heads; the others: with 1000 classes.
PARAMETERS = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1.4b": 1_364_297_728,
    "llama-3.2b": 3_202_513_920,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen-0.5b": 494_032_768,
    "qwen-1.5b": 1_543_714_304,
    "qwen-7b": 7_615_616_512,
    "mixtral-8x7b": 46_702_792_704,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "vit-base-16": 86_567_656,
    "vit-large-16": 304_326_632,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "vgg-16": 138_357_544,
    "inception-v4": 42_679_816,
    # two layers of 4 gates: input and state matrices and a bias; the embedding; the head
    "lstm-medium": 2 * 4 * (2 * 650 * 650 + 650) + 10_000 * 650 + 650 * 10_000 + 10_000,
    "lstm-large": 2 * 4 * (2 * 1500 * 1500 + 1500) + 10_000 * 1500 + 1500 * 10_000 + 10_000,
    # down: 3×3 convolutions and BatchNorms in pairs; up: a 2×2 transposed convolution with bias and such a pair; a 1×1 head with bias
    "unet": sum(9 * (i * o + o * o) + 4 * o for i, o in ((1, 64), (64, 128), (128, 256), (256, 512), (512, 1024)))
    + sum(2 * o * o * 4 + o + 9 * (2 * o * o + o * o) + 4 * o for o in (512, 256, 128, 64))
    + 64 * 2 + 2,
}  # fmt: skip


def test_names_do_not_load_torch():
    code = "import sys; from tierwise import zoo; print(len(zoo.names())); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_model_has_its_published_number_of_parameters(name):
    with torch.device("meta"):
        model = zoo.build(name, batch=1).model
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_every_family_of_the_catalogue_has_a_tiny_model():
    assert {ENTRIES[name].family for name in TINY} == {entry.family for entry in ENTRIES.values()}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_learns_its_batch(name):
    built = zoo.build(name)
    assert sum(parameter.numel() for parameter in built.model.parameters()) < 25_000
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        torch.manual_seed(1)  # the same dropout in each step
        loss = zoo.loss_of(built.model(**built.batch))
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in built.model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0] < 10


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_trains_on_fake_tensors_in_16_bits(name):
    with FakeTensorMode(), torch.device("cpu"):
        built = zoo.build(name, dtype="bf16")
        zoo.loss_of(built.model(**built.batch)).backward()
    assert all(isinstance(tensor, FakeTensor) for tensor in (*built.model.parameters(), *built.model.buffers(), *built.batch.values()))
    assert all(parameter.dtype == torch.bfloat16 and parameter.grad is not None for parameter in built.model.parameters())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_runs_under_autocast(name):
    built = zoo.build(name, dtype="amp-bf16")
    assert built.autocast == torch.bfloat16
    with torch.autocast("cpu", dtype=built.autocast):
        loss = zoo.loss_of(built.model(**built.batch))
    loss.backward()
    assert loss.isfinite()
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.float32}


def test_the_same_name_gives_the_same_weights_and_leaves_the_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = zoo.build("gpt2-tiny"), zoo.build("gpt2-tiny")
    with FakeTensorMode(), torch.device("cpu"):
        zoo.build("gpt2-tiny")
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert torch.equal(first.batch["input_ids"], second.batch["input_ids"])
    assert torch.get_default_dtype() == torch.float32


def test_counts_of_samples_and_tokens():
    with FakeTensorMode(), torch.device("cpu"):
        llama = zoo.build("llama-1.4b", batch=3, seq=100)
        t5 = zoo.build("t5-base", batch=2, seq=512)
        resnet = zoo.build("resnet-50", batch=5)
    assert (llama.samples_per_step, llama.tokens_per_step, llama.dtype, llama.autocast) == (3, 300, "bf16", None)
    assert (t5.samples_per_step, t5.tokens_per_step) == (2, 2 * (512 + 114))
    assert (resnet.samples_per_step, resnet.tokens_per_step, resnet.dtype) == (5, 0, "fp32")


def test_labels_are_the_tokens_that_follow():
    batch = zoo.build("gpt2-tiny").batch
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])


def test_experts_with_seats_for_all_mix_the_two_most_likely():
    """With as many experts as each token visits, nobody is turned away, and the sum can be written down directly."""
    torch.manual_seed(0)
    experts, x = Experts(hidden=4, intermediate=6, experts=2, chosen=2), torch.randn(3, 5, 4)
    experts.router.weight.data.normal_()
    mixed, balance = experts(x)
    chance = experts.router(x).softmax(-1)
    each = [(torch.nn.functional.silu(x @ experts.gate[e]) * (x @ experts.up[e])) @ experts.down[e] for e in range(2)]
    torch.testing.assert_close(mixed, chance[..., :1] * each[0] + chance[..., 1:] * each[1])
    torch.testing.assert_close(balance, torch.tensor(2.0))  # every token visits both: the shares are equal


def test_a_token_beyond_the_seats_skips_its_expert():
    """Four tokens, two experts, one visit each: two seats an expert. All want expert 0, so the last two get nothing."""
    experts = Experts(hidden=2, intermediate=3, experts=2, chosen=1)
    experts.router.weight.data = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    x = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0], [1.0, 1.0]])
    mixed, _ = experts(x)
    expected = (torch.nn.functional.silu(x @ experts.gate[0]) * (x @ experts.up[0])) @ experts.down[0]
    torch.testing.assert_close(mixed[:2], expected[:2])
    assert torch.equal(mixed[2:], torch.zeros(2, 2))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch": 0}, "batch is 0"),
        ({"seq": 2.5}, "seq is 2.5"),
        ({"batch": True}, "batch is True"),
        ({"seq": 33}, "32 learned positions, and seq is 33"),
        ({"dtype": "bf61"}, "unknown dtype 'bf61'; did you mean 'bf16'?"),
        ({"lora": -1}, "lora is -1"),
    ],
)
def test_senseless_options_are_refused(options, words):
    with pytest.raises(BadInput, match=words.replace("?", r"\?")):
        zoo.build("gpt2-tiny", **options)


def test_images_have_no_seq():
    with pytest.raises(BadInput, match="images of 32×32 pixels and has no seq"):
        zoo.build("resnet-tiny", seq=16)


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'llama-7b'"):
        zoo.build("lama-7b")


def test_where_the_loss_is_found():
    scalar = torch.tensor(1.0)
    assert zoo.loss_of(scalar) is scalar
    assert zoo.loss_of({"loss": scalar, "logits": torch.zeros(2)}) is scalar
    assert zoo.loss_of((scalar, torch.zeros(2))) is scalar
    with pytest.raises(BadInput, match=r"a tensor of shape \(2, 3\) where the loss should be"):
        zoo.loss_of(torch.zeros(2, 3))
    with pytest.raises(BadInput, match="returned list where the loss"):
        zoo.loss_of([scalar])
