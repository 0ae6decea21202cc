"""GPT, BERT and T5 from megatron-core's own model classes and local layer specs.

[Note: T5's stages] megatron-core 0.16 to 0.19 pipeline T5 only with all encoders on
the first of two stages and all decoders on the second: a stage passes one tensor on,
and a stage in the middle of the decoders would need the encoder's output as well.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ssdtrain.errors import ConfigError
from ssdtrain.train.mcore.layers import MarkedNorm, layer_spec
from ssdtrain.train.mcore.parallel import Parallel
from ssdtrain.train.settings import Family, ModelSettings

MLP_RATIO = 4
GEMM = "te_general_gemm"
"""What megatron-core's routers take from Transformer Engine, if that is there."""


def check_layout(settings: ModelSettings, parallel: Parallel) -> None:
    """Raise ConfigError for what megatron-core cannot build."""
    layers, stages = settings.num_layers, parallel.pipeline * parallel.chunks
    if settings.family is Family.T5 and parallel.pipeline > 1:
        if parallel.pipeline != 2 or parallel.virtual_pipeline is not None:
            raise ConfigError(
                "megatron-core pipelines T5 only as encoder | decoder on two stages; "
                "set parallel.pipeline=2 and no parallel.virtual_pipeline, or "
                "engine=deepspeed for deeper pipelines."
            )
    elif layers % stages:
        raise ConfigError(
            f"model.num_layers={layers} must be divisible by the stages, "
            f"{parallel.pipeline} x {parallel.chunks}"
        )
    if settings.family is Family.BERT and parallel.sequence:
        raise ConfigError(
            "megatron-core's BERT head builds torch's LayerNorm, which refuses "
            "sequence parallelism without Apex; set parallel.sequence=false."
        )


def config_of(
    settings: ModelSettings, parallel: Parallel, dtype: torch.dtype, **more: Any
) -> TransformerConfig:
    """Return Megatron's configuration for these settings; `more`: its fields, over
    them."""
    recompute: dict[str, Any] = {}
    if parallel.recompute is not None:
        recompute = {"recompute_granularity": parallel.recompute}
    if parallel.recompute == "full":
        recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif parallel.recompute is not None:
        recompute |= {"recompute_modules": ["core_attn"]}
    values: dict[str, Any] = {
        "num_layers": settings.num_layers,
        "hidden_size": settings.hidden_size,
        "num_attention_heads": settings.num_heads,
        "ffn_hidden_size": MLP_RATIO * settings.hidden_size,
        "hidden_dropout": settings.dropout,
        "attention_dropout": settings.dropout,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "sequence_parallel": parallel.sequence,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "deallocate_pipeline_outputs": parallel.pipeline > 1,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        # Its kernel is built by Megatron-LM, not by megatron-core.
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": True,
        **recompute,
        **more,
    }
    return TransformerConfig(**values)


class MegatronBert(BertModel):  # type: ignore[misc]
    """megatron-core's BERT, which may be told that nothing is padded."""

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        # The stock check asks Transformer Engine's version of any other attention.
        return "b1ss"

    def bert_extended_attention_mask(self, attention_mask: Tensor | None) -> Any:
        """Return the stock mask; None stays None."""
        if attention_mask is None:
            return None
        return super().bert_extended_attention_mask(attention_mask)


class Chunks:
    """Builds the model chunks of this rank."""

    def __init__(
        self,
        settings: ModelSettings,
        config: TransformerConfig,
        vocab_size: int,
        fused: bool = True,
    ) -> None:
        self._settings = settings
        self._config = config
        self._vocab_size = vocab_size
        self._fused = fused

    def build(self) -> list[nn.Module]:
        """Return all chunks of this rank, in the order that the schedules expect."""
        virtual = self._config.virtual_pipeline_model_parallel_size
        kinds = {
            Family.GPT: self._gpt,
            Family.BERT: self._bert,
            Family.T5: self._t5,
        }
        build = kinds[self._settings.family]
        stages = [None] if virtual is None else list(range(virtual))
        return [self._ready(build(stage)) for stage in stages]

    def _ready(self, module: nn.Module) -> nn.Module:
        """Move a chunk to this rank's device and precision."""
        if torch.cuda.is_available():
            module = module.cuda(torch.cuda.current_device())
        if self._config.bf16 or self._config.fp16:
            module = Float16Module(self._config, module)
        return module.train()

    def _ends(self, stage: int | None) -> dict[str, Any]:
        """Return whether a chunk holds the embedding and the head."""
        where = {"ignore_virtual": stage is None, "vp_stage": stage}
        return {
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
        }

    def _common(self) -> dict[str, Any]:
        return {
            "config": self._config,
            "vocab_size": self._vocab_size,
            "max_sequence_length": self._settings.sequence_length,
            "parallel_output": True,
            "share_embeddings_and_output_weights": False,
        }

    def _block(self, spec: Any, num_layers: int) -> TransformerBlockSubmodules:
        spec = layer_spec(spec, self._fused)
        return TransformerBlockSubmodules([spec] * num_layers, layer_norm=MarkedNorm)

    def _gpt(self, stage: int | None) -> nn.Module:
        count = get_num_layers_to_build(self._config, stage)
        experts = self._config.num_moe_experts
        if experts is not None and not hasattr(moe_utils, GEMM):
            setattr(moe_utils, GEMM, None)  # 0.19 asks whether it is None
        spec = get_gpt_layer_local_spec(experts)
        model: nn.Module = GPTModel(
            transformer_layer_spec=self._block(spec, count),
            position_embedding_type="learned_absolute",
            vp_stage=stage,
            **self._common(),
            **self._ends(stage),
        )
        return model

    def _bert(self, stage: int | None) -> nn.Module:
        count = get_num_layers_to_build(self._config, stage)
        model: nn.Module = MegatronBert(
            num_tokentypes=0,
            transformer_layer_spec=self._block(bert_layer_local_spec, count),
            add_binary_head=False,
            vp_stage=stage,
            **self._common(),
            **self._ends(stage),
        )
        return model

    def _t5(self, stage: int | None) -> nn.Module:
        """See [Note: T5's stages]."""
        ends = self._ends(stage)
        decoders = self._settings.num_layers // 2
        encoders = self._settings.num_layers - decoders
        whole = self._config.pipeline_model_parallel_size == 1
        model: nn.Module = T5Model(
            encoder_config=self._config,
            transformer_encoder_layer_spec=self._block(
                encoder_model_with_local_spec(), encoders
            ),
            transformer_decoder_layer_spec=self._block(
                decoder_model_with_local_spec(), decoders
            ),
            add_encoder=whole or ends["pre_process"],
            add_decoder=whole or ends["post_process"],
            # Both stages embed: the first the source, the second the target.
            pre_process=True,
            post_process=ends["post_process"],
            **self._common(),
        )
        return model
