"""Models of Hugging Face transformers, as they are in the library, with tiny configurations."""

import pytest
import torch
from capture import real
from capture.models import kept_peak_bytes, saved_bytes

from tierwise.capture import capture, capture_step
from tierwise.ir import Phase, Role

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 100, (2, 32), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
RANDOM_STATE_BYTES = 16  # attention's, a layer; the CPU's kernel saves none


def llama(**more):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=4, max_position_embeddings=64, **{"use_cache": False} | more)
    return transformers.LlamaForCausalLM(config).train()


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=100, n_positions=64)).train()


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).train()


def t5():
    config = transformers.T5Config(d_model=64, d_ff=128, num_layers=3, num_heads=4, d_kv=16, vocab_size=100, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).train()


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)).train()


def blocks(graph):
    """How many calls each class of blocks has."""
    counts = {region.kind: 0 for region in graph.regions if region.kind.endswith(("Layer", "Block"))}
    for call in graph.calls:
        if (kind := graph.regions[call.region].kind) in counts:
            counts[kind] += 1
    return counts


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (llama, {"LlamaDecoderLayer": 3}),
        (gpt2, {"GPT2Block": 3}),
        (bert, {"BertLayer": 3}),
        (t5, {"T5Block": 6}),
        (mixtral, {"MixtralDecoderLayer": 3}),
    ],
)
def test_every_block_is_a_region_and_every_parameter_is_updated(model, expected):
    model = model()
    captured = capture_step(model, {"input_ids": IDS, "labels": IDS})
    assert captured.notes == ()
    assert blocks(captured.graph) == expected
    assert sum(op.kind == "update" for op in captured.graph.ops) == len(list(model.parameters()))


@pytest.mark.parametrize("use_cache", [False, True])
def test_llama_saves_and_holds_what_the_real_model_does(use_cache):
    model, batch = llama(use_cache=use_cache), {"input_ids": IDS, "labels": IDS}
    graph = capture(model, batch, optimizer="sgd")
    saved = [nbytes for nbytes in saved_bytes(graph) if nbytes != 8]  # the random state of attention
    assert saved == [nbytes for nbytes in real.saved_bytes(model, batch) if nbytes != 8]

    def step():
        out = model(**batch)
        loss = out.loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    assert kept_peak_bytes(graph) == real.peak_bytes(step) + 3 * RANDOM_STATE_BYTES


def test_a_mask_that_hides_nothing_costs_nothing_and_one_that_does_is_used():
    full = torch.ones_like(IDS)
    padded = full.clone()
    padded[0, 20:] = 0
    free, masked = (capture(llama().to(torch.bfloat16), {"input_ids": IDS, "labels": IDS, "attention_mask": mask}) for mask in (full, padded))
    assert any(op.name.endswith("flash_attention") for op in free.ops)
    assert any(op.name.endswith("efficient_attention") for op in masked.ops)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_runs_the_blocks_again_in_backward(use_reentrant):
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    graph = capture(model, {"input_ids": IDS, "labels": IDS})
    assert blocks(graph) == {"LlamaDecoderLayer": 3}
    again = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.kind == "silu"]
    assert [graph.calls[op.region].module for op in again] == ["model.layers.2", "model.layers.1", "model.layers.0"]


def test_lora_trains_the_adapters_only():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama().to(torch.bfloat16), config).train()
    graph = capture(model, {"input_ids": IDS, "labels": IDS})
    assert sum(op.kind == "update" for op in graph.ops) == 3 * 2 * 2  # layers, projections, A and B
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {found.name.removesuffix(".grad") for found in graph.storages if found.role is Role.GRAD} == trained
    # The first layer is of another class: the frozen embedding below it needs no gradient.
    assert [
        [call.module.rpartition(".")[2] for call in graph.calls if call.region == region.id] for region in graph.regions if "Layer" in region.kind
    ] == [
        ["0"],
        ["1", "2"],
    ]


def test_autocast_of_a_whole_model():
    graph = capture(gpt2(), {"input_ids": IDS, "labels": IDS}, autocast=torch.bfloat16)
    precisions = {op.kind: op.precision for op in graph.ops if op.phase is Phase.FORWARD}
    assert (precisions["matmul"], precisions["attention"], precisions["layer_norm"], precisions["log_softmax"]) == ("bf16", "bf16", "fp32", "fp32")
