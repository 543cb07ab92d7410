"""The zoo computes what the published models compute: same weights, same loss as transformers; same bits as peft."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tierwise import zoo
from tierwise.errors import BadInput
from tierwise.zoo.lora import LoRALinear


def take_weights(model: nn.Module, theirs: nn.Module, *renamings: tuple[str, str]) -> None:
    """Their weights into our model: the renamings, one after the other, turn our names into theirs, with '+' between those to be joined."""
    weights = theirs.state_dict()
    for name, parameter in model.state_dict().items():
        for pattern, replacement in renamings:
            name = re.sub(pattern, replacement, name)
        joined = torch.cat([weights[part] for part in name.split("+")])
        parameter.copy_(joined.T if joined.shape != parameter.shape else joined)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    model, batch = (built := zoo.build("gpt2-tiny")).model, built.batch
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    theirs = transformers.GPT2LMHeadModel(config)
    for block in theirs.transformer.h:  # square matrices: turned here, since their shape does not tell
        block.attn.c_proj.weight.data = block.attn.c_proj.weight.data.T.contiguous()
    take_weights(
        model, theirs,
        ("token_embedding", "transformer.wte"), ("position_embedding", "transformer.wpe"), ("^norm", "transformer.ln_f"), ("blocks", "transformer.h"),
        ("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2"), ("attention.qkv", "attn.c_attn"), ("attention.out", "attn.c_proj"),
        ("feed_forward.up", "mlp.c_fc"), ("feed_forward.down", "mlp.c_proj"),
    )  # fmt: skip
    for block in theirs.transformer.h:
        block.attn.c_proj.weight.data = block.attn.c_proj.weight.data.T.contiguous()
    torch.testing.assert_close(model(batch["input_ids"]), theirs(batch["input_ids"]).logits)
    torch.testing.assert_close(model(**batch), theirs(batch["input_ids"], labels=batch["input_ids"], shift_labels=batch["labels"]).loss)


@pytest.mark.parametrize("name", ["llama-tiny", "qwen-tiny"])
def test_llama_and_qwen(name):
    transformers = pytest.importorskip("transformers")
    model, batch = (built := zoo.build(name)).model, built.batch
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    if name == "llama-tiny":
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=2, rms_norm_eps=1e-5))
    else:
        theirs = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                **shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        )  # fmt: skip
    take_weights(
        model, theirs,
        ("^embedding", "model.embed_tokens"), ("^norm", "model.norm"), ("^head", "lm_head"), ("blocks", "model.layers"),
        ("attention_norm", "input_layernorm"), ("feed_forward_norm", "post_attention_layernorm"),
        ("attention.query", "self_attn.q_proj"), ("attention.key", "self_attn.k_proj"), ("attention.value", "self_attn.v_proj"),
        ("attention.out", "self_attn.o_proj"), (r"feed_forward\.(\w+)", r"mlp.\1_proj"),
    )  # fmt: skip
    torch.testing.assert_close(model(batch["input_ids"]), theirs(batch["input_ids"]).logits)


def test_bert():
    transformers = pytest.importorskip("transformers")
    model, batch = (built := zoo.build("bert-tiny")).model.eval(), built.batch
    config = transformers.BertConfig(
        vocab_size=64, max_position_embeddings=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    theirs = transformers.BertForPreTraining(config).eval()
    attention = "bert.encoder.layer.{0}.attention.self"
    take_weights(
        model, theirs,
        ("(word|position)_embedding", r"bert.embeddings.\1_embeddings"), ("segment_embedding", "bert.embeddings.token_type_embeddings"),
        ("embedding_norm", "bert.embeddings.LayerNorm"), ("pooler", "bert.pooler.dense"), ("next_sentence", "cls.seq_relationship"),
        ("transform_norm", "cls.predictions.transform.LayerNorm"), (r"^transform\.", "cls.predictions.transform.dense."),
        ("vocab_bias", "cls.predictions.bias"), ("attention_norm", "attention.output.LayerNorm"), ("attention.out\\.", "attention.output.dense."),
        (r"blocks\.(\d)\.attention\.qkv\.(\w+)", "+".join(attention.replace("{0}", r"\1") + rf".{part}.\2" for part in ("query", "key", "value"))),
        ("blocks", "bert.encoder.layer"), ("feed_forward_norm", "output.LayerNorm"), ("feed_forward.up", "intermediate.dense"),
        ("feed_forward.down", "output.dense"),
    )  # fmt: skip
    given = {"input_ids": batch["input_ids"], "token_type_ids": batch["segment_ids"]}
    words = theirs(**given).prediction_logits
    chosen = words.gather(1, batch["masked_positions"].unsqueeze(-1).expand(-1, -1, 64))
    torch.testing.assert_close(model(batch["input_ids"], batch["segment_ids"], batch["masked_positions"]), chosen)
    follows = theirs(**given).seq_relationship_logits
    cross_entropy = nn.functional.cross_entropy
    loss = cross_entropy(chosen.flatten(0, 1), batch["masked_labels"].flatten()) + cross_entropy(follows, batch["next_sentence_labels"])
    torch.testing.assert_close(model(**batch), loss)


def test_t5():
    transformers = pytest.importorskip("transformers")
    model = zoo.build("t5-tiny", batch=2, seq=200).model.eval()  # far enough apart for the last bucket
    batch = {"input_ids": torch.arange(400).view(2, 200) % 64, "labels": torch.arange(300).view(2, 150) * 7 % 64}
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    take_weights(
        model, theirs,
        ("^embedding", "shared"), (r"(\w+coder)_norm", r"\1.final_layer_norm"),
        (r"(\w+coder)_bias.embedding", r"\1.block.0.layer.0.SelfAttention.relative_attention_bias"), (r"(\w+coder)_blocks", r"\1.block"),
        ("cross_norm", "layer.1.layer_norm"), (r"(?<=\d\.)attention_norm", "layer.0.layer_norm"),
        (r"encoder(.*)feed_forward_norm", r"encoder\1layer.1.layer_norm"), (r"decoder(.*)feed_forward_norm", r"decoder\1layer.2.layer_norm"),
        ("cross_attention", "layer.1.EncDecAttention"), (r"(?<=\d\.)attention", "layer.0.SelfAttention"),
        (r"(Attention\.)(q|k|v|o)(uery|ey|alue|ut)\b", r"\1\2"),
        (r"encoder(.*)feed_forward", r"encoder\1layer.1.DenseReluDense"), (r"decoder(.*)feed_forward", r"decoder\1layer.2.DenseReluDense"),
        ("Dense.up", "Dense.wi"), ("Dense.down", "Dense.wo"),
    )  # fmt: skip
    torch.testing.assert_close(model(**batch), theirs(**batch).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_has_the_bits_of_peft(dtype):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, dtype=dtype))
    ours = LoRALinear(nn.Linear(12, 20, dtype=dtype), rank=4)
    ours.base.load_state_dict(model[0].state_dict())
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"])).base_model.model[0]
    nn.init.normal_(ours.wide.weight)
    theirs.lora_A["default"].weight.data = ours.thin.weight.data.clone()
    theirs.lora_B["default"].weight.data = ours.wide.weight.data.clone()
    assert {p.dtype for n, p in theirs.named_parameters() if "lora" in n} == {ours.thin.weight.dtype, ours.wide.weight.dtype}
    x = torch.randn(3, 12, dtype=dtype)
    assert torch.equal(ours(x), theirs(x))
    ours(x).sum().backward()
    theirs(x).sum().backward()
    assert torch.equal(ours.thin.weight.grad, theirs.lora_A["default"].weight.grad)
    assert torch.equal(ours.wide.weight.grad, theirs.lora_B["default"].weight.grad)


def test_lora_trains_the_adapters_of_the_blocks_and_nothing_else():
    built = zoo.build("llama-tiny", lora=4)
    zoo.loss_of(built.model(**built.batch)).backward()
    trained = {name for name, parameter in built.model.named_parameters() if parameter.grad is not None}
    layers = ["attention.query", "attention.key", "attention.value", "attention.out", "feed_forward.gate", "feed_forward.up", "feed_forward.down"]
    assert trained == {f"blocks.{block}.{layer}.{half}.weight" for block in range(2) for layer in layers for half in ("thin", "wide")}
    assert trained == {name for name, parameter in built.model.named_parameters() if parameter.requires_grad}


def test_lora_starts_at_the_unadapted_model():
    plain, adapted = zoo.build("gpt2-tiny"), zoo.build("gpt2-tiny", lora=2)
    assert torch.equal(plain.model(**plain.batch), adapted.model(**plain.batch))


def test_lora_leaves_routers_alone_and_works_on_fake_tensors():
    with FakeTensorMode(), torch.device("cpu"):
        built = zoo.build("mixtral-tiny", dtype="bf16", lora=8)
        zoo.loss_of(built.model(**built.batch)).backward()
    assert not any("router" in name for name, parameter in built.model.named_parameters() if parameter.requires_grad)


def test_lora_on_a_model_without_linear_layers_in_blocks_is_refused():
    with pytest.raises(BadInput, match="resnet-tiny has no linear layers wider than 4 in repeated blocks"):
        zoo.build("resnet-tiny", lora=4)
