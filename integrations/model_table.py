"""The models that were tried: tested ones, and ones that no structural check of models.py can recognise."""

from typing import Final

SUPPORTED: Final[frozenset[str]] = frozenset(
    """
    afmoe apertus arcee aria_text axk1 bamba beam bitnet cohere cohere2 cohere2_moe ctrl cwm dbrx deepseek_v2
    deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text
    longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder
    nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 vaultgemma youtu zamba
    """.split()
)
"""`model_type` of every model that tests/processes/test_models.py compares with its documents run alone."""

BOTH_WAYS: Final = "tokens of an image see each other, later ones too, and CAD computes causal attention"

REFUSED: Final[dict[str, str]] = {
    "gemma3": BOTH_WAYS,
    "paligemma": BOTH_WAYS,
    "diffllama": "differential attention calls the same attention module twice in one layer",
    "doge": "its attention mask is computed from the values, so that no plan can know it",
    "hrm_text": "it runs the same layers several times in one forward, and its prefix is not causal",
    "moshi": "its audio codebooks are not one causal stream of tokens",
}
"""`model_type` to reason, for models whose config and modules do not show why CAD cannot reproduce them."""

SEEING: Final[frozenset[str]] = frozenset(
    """
    internvl llava llava_next mistral3 qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe
    """.split()
)
"""`model_type` of models of several modalities whose decoder of text attends by CAD, images and videos in it;
tests/processes/test_vision.py compares them likewise."""
