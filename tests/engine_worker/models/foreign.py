"""Small configurations of architectures without a native implementation: some that the adapter serves, and some that it
refuses."""

from transformers import (
    BertConfig,
    BioGptConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    CTRLConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MinistralConfig,
    MixtralConfig,
    NanoChatConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.engine_worker.models.checkpoints import SIZES

PLAIN = SIZES | {"pad_token_id": None, "num_attention_heads": 4}
GROUPED = PLAIN | {"num_key_value_heads": 2}
LAYERED = GROUPED | {"num_hidden_layers": 4, "sliding_window": 20}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 64,
}

WINDOWED: dict[str, PreTrainedConfig] = {
    "cohere2": Cohere2Config(**LAYERED),
    "exaone4": Exaone4Config(**LAYERED),
    "gemma3": Gemma3TextConfig(**LAYERED, head_dim=16, layer_types=[SLIDING, FULL] * 2),
    "ministral": MinistralConfig(**LAYERED, head_dim=16),
    "olmo3": Olmo3Config(**LAYERED),
    "phi3": Phi3Config(**GROUPED, sliding_window=20),
    "phimoe": PhimoeConfig(**GROUPED, **EXPERTS, num_local_experts=4, sliding_window=20),
    "starcoder2": Starcoder2Config(**GROUPED, sliding_window=20),
}
UNWINDOWED: dict[str, PreTrainedConfig] = {
    "biogpt": BioGptConfig(**PLAIN | {"pad_token_id": 1}),
    "cohere": CohereConfig(**GROUPED),
    "ctrl": CTRLConfig(**GPT2, dff=80),
    "deepseek v3": DeepseekV3Config(
        **PLAIN,
        **EXPERTS,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=2,
        moe_intermediate_size=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        kv_lora_rank=16,
        q_lora_rank=16,
        first_k_dense_replace=1,
    ),
    "ernie": Ernie4_5Config(**GROUPED, head_dim=12),
    "gemma": GemmaConfig(**GROUPED, head_dim=16),
    "glm4": Glm4Config(**GROUPED, head_dim=16),
    "gpt2": GPT2Config(**GPT2),
    "gpt bigcode": GPTBigCodeConfig(**GPT2),
    "gpt neox": GPTNeoXConfig(**PLAIN),
    "granite": GraniteConfig(
        **GROUPED, attention_multiplier=0.3, logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=3.0
    ),
    "granite moe": GraniteMoeConfig(**GROUPED, **EXPERTS, num_local_experts=4),
    "helium": HeliumConfig(**GROUPED, head_dim=12),
    "hunyuan": HunYuanDenseV1Config(**GROUPED, head_dim=16),
    "llama, yarn": LlamaConfig(**GROUPED, rope_parameters=YARN),
    "mixtral": MixtralConfig(**GROUPED, **EXPERTS, num_local_experts=4),
    "nanochat": NanoChatConfig(**GROUPED),
    "nemotron": NemotronConfig(**GROUPED | {"hidden_size": 64}),
    "olmo": OlmoConfig(**GROUPED),
    "olmo2": Olmo2Config(**GROUPED),
    "olmoe": OlmoeConfig(**GROUPED, **EXPERTS, num_experts=4),
    "opt": OPTConfig(
        vocab_size=97,
        hidden_size=48,
        ffn_dim=80,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        init_std=0.3,
        pad_token_id=1,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "persimmon": PersimmonConfig(**PLAIN | {"hidden_size": 64}),
    "phi": PhiConfig(**GROUPED, partial_rotary_factor=0.5),
    "qwen2 moe": Qwen2MoeConfig(
        **GROUPED, **EXPERTS, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "smollm3": SmolLM3Config(**GROUPED),
    "stablelm": StableLmConfig(**GROUPED | {"hidden_size": 64}),
}
ADAPTED = WINDOWED | UNWINDOWED

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "soft capping": (Gemma2Config(**GROUPED, head_dim=16), "passes softcap to attention"),
    "sinks": (GptOssConfig(**GROUPED, head_dim=12, num_local_experts=4), "passes s_aux to attention"),
    "rope by the longest sequence": (
        Phi3Config(**GROUPED, original_max_position_embeddings=64, rope_parameters=LONGROPE),
        "rope type 'longrope' is not supported: it depends on the longest sequence",
    ),
    "custom attention": (FalconConfig(**PLAIN), "cannot run on the tokens of many sequences"),
    "another custom attention": (GPTJConfig(**GPT2, rotary_dim=8), "cannot run on the tokens of many sequences"),
    "alibi": (BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=4), "calls attention 0 times"),
    "state space": (MambaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2), "calls attention 0 times"),
    "convolution": (Lfm2Config(**GROUPED), "or its operations depend on values"),
    "two attentions in a layer": (DiffLlamaConfig(**GROUPED), "calls attention 4 times in 2"),
    "a mask with numbers": (DogeConfig(**GROUPED), "a custom mask"),
    "not causal": (BertConfig(**PLAIN, is_decoder=False), "neither causal nor a sliding window"),
}
