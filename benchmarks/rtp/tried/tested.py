"""Families that the tests train, too."""

from benchmarks.rtp.tried.causal import EXPERTS, GPT
from benchmarks.rtp.tried.family import HEADS, Family, causal, masked, seq2seq

TESTED = {
    "Llama": causal("Llama"),
    "Mistral": causal("Mistral"),
    "Qwen2": causal("Qwen2"),
    "Qwen3": causal("Qwen3", head_dim=6),
    "Gemma 2": causal("Gemma2", head_dim=6),
    "Gemma 3": causal("Gemma3", "Gemma3TextConfig", head_dim=6),
    "Phi-3": causal("Phi3"),
    "GPT-NeoX": causal("GPTNeoX"),
    "Mamba": causal("Mamba", state_size=4),
    "Mixtral": causal("Mixtral", **EXPERTS),
    "Qwen3-MoE": causal("Qwen3Moe", **EXPERTS, head_dim=6),
    "GPT-OSS": causal("GptOss", **EXPERTS, head_dim=6),
    "GPT-2": Family("GPT2LMHeadModel", GPT, generates=True),
    "BERT": masked("Bert"),
    "T5": seq2seq("T5", d_kv=4, d_ff=20, decoder_start_token_id=0, **HEADS),
}
