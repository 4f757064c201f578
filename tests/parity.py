# SPDX-License-Identifier: Apache-2.0
"""What the tests against transformers are made of: families of tiny random models, our outputs and gradients of a
folder, and theirs, also in float64."""
import contextlib
import copy
import dataclasses
import json
import subprocess
import types

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conftest import program, random_model


@dataclasses.dataclass(frozen=True)
class Family:
    """model_class and config_class name classes of transformers; `settings` are those of a small model."""
    model_class: type
    config_class: type
    modeling: types.ModuleType
    settings: dict

    def config(self, **changes):
        return self.config_class(**self.settings | changes)

    def model(self, seed=0, **changes):
        model = random_model(self.model_class, self.config(**changes), seed)
        model.config._experts_implementation = "eager"   # the plain loop over experts, in any dtype
        return model


MODEL = dict(
    vocab_size=300, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_conv_kernel_dim=4, tie_word_embeddings=False, max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                     "mrope_interleaved": True, "mrope_section": [2, 1, 1]})
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=28)


def plain_rotary(theta=10000.0, factor=0.5):
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}


FAMILIES = {
    "qwen3_5": Family(transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig,
                      transformers.models.qwen3_5.modeling_qwen3_5, MODEL | dict(intermediate_size=80)),
    "qwen3_next": Family(transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig,
                         transformers.models.qwen3_next.modeling_qwen3_next,
                         MODEL | EXPERTS | dict(intermediate_size=80, rope_parameters=plain_rotary())),
    "qwen3_5_moe": Family(transformers.Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeTextConfig,
                          transformers.models.qwen3_5_moe.modeling_qwen3_5_moe, MODEL | EXPERTS),
}


class MultiTokenPrediction(torch.nn.Module):
    """The block that transformers leaves out, of its layer and norms: from hidden states after the final norm and the
    next tokens to logits of the tokens after those. Named as in checkpoints, below "mtp."."""

    def __init__(self, family, model, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        config, prefix = model.config, family.model_class.__name__.removesuffix("ForCausalLM")
        norm = getattr(family.modeling, prefix + "RMSNorm")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, eps=eps) for _ in range(3))
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        layer = getattr(family.modeling, prefix + "DecoderLayer")
        self.layers = torch.nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.06 if parameter.dim() > 1 else 0.2)

    def forward(self, model, hidden, ids):
        """hidden [1, T, D] of ids [1, T] to logits [1, T - 1, V]; the last one is for a token that is not there."""
        next_embedding = self.pre_fc_norm_embedding(model.model.embed_tokens(ids[:, 1:]))
        x = self.fc(torch.cat([next_embedding, self.pre_fc_norm_hidden(hidden[:, :-1])], -1))
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=model.model.rotary_emb(x, positions), attention_mask=mask,
                           position_ids=positions)
        return model.lm_head(self.norm(x))


def save_as_in_memory(model, folder, mtp=None):
    """The folder that holds each parameter under its name in transformers, experts fused."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if mtp is not None:
        tensors |= {"mtp." + name: tensor for name, tensor in mtp.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()


def ours(folder, sequences, tmp_path, **options):
    """Logits, loss and gradients ("grad.NAME") of the packed sequences. Options: those of tests/drivers/model_outputs."""
    request, out = tmp_path / "request.json", tmp_path / "out.safetensors"
    request.write_text(json.dumps(options | {"sequences": sequences}))
    subprocess.run([program("model_outputs"), folder, request, out], check=True)
    return load_file(out)


@contextlib.contextmanager
def widened(modeling):
    """transformers' own code with float64 wherever it says float32: its gates and norms cast there by name."""
    class Widened:
        def __getattr__(self, name):
            return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch", Widened())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def theirs_exactly(family, model, sequences, mtp=None, **weights):
    """Logits, loss and gradients in float64. In float32 their gradients of A_log and dt_bias are off by up to 3e-4: they
    take differences of large sums."""
    exact, exact_mtp = copy.deepcopy(model).double(), copy.deepcopy(mtp)
    with widened(family.modeling):
        return theirs(family, exact, sequences, exact_mtp and exact_mtp.double(), **weights)


def theirs(family, model, sequences, mtp=None, router_aux_loss_coef=0.0, mtp_loss_scale=0.0):
    """Logits, loss and gradients, each sequence run alone: transformers' own packed run leaks (the convolution and the
    recurrence do not restart there). The load-balancing loss is that of all sequences' router logits together."""
    model.zero_grad()
    logits, loss, routers = [], 0, []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        result = model(ids, use_cache=False, output_hidden_states=mtp is not None,
                       **(dict(output_router_logits=True) if router_aux_loss_coef else {}))
        out = result.logits[0]
        out = out if out.dtype == torch.float64 else out.float()
        logits.append(out.detach())
        loss = loss + torch.nn.functional.cross_entropy(out[:-1], ids[0, 1:], reduction="sum")
        routers.append(result.router_logits if router_aux_loss_coef else ())
        if mtp is not None and len(sequence) > 2:
            ahead = mtp(model, result.hidden_states[-1], ids)[0]
            loss = loss + mtp_loss_scale * torch.nn.functional.cross_entropy(ahead[:-1], ids[0, 2:], reduction="sum")
    if router_aux_loss_coef:
        pooled = tuple(torch.cat(layer) for layer in zip(*routers))
        balance = family.modeling.load_balancing_loss_func(pooled, model.config.num_experts,
                                                           model.config.num_experts_per_tok)
        loss = loss + router_aux_loss_coef * balance
    loss.backward()
    named = dict(model.named_parameters())
    if mtp is not None:
        named |= {"mtp." + name: parameter for name, parameter in mtp.named_parameters()}
    return torch.cat(logits), loss.detach(), {name: p.grad for name, p in named.items() if p.grad is not None}


def random_sequences(lengths, vocab=300, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
