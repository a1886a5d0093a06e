"""Models that many people have, beyond `families`; `benchmarks.rtp.families` has more of them."""

import pytest

from benchmarks.rtp.families import takes, tried
from tests.distributed.conftest import StartRanks

NAMES = [
    *("DeepSeek-V3", "Qwen3-Next", "Llama 4", "GLM-4-MoE", "Gemma 3n", "Cohere 2", "LFM2"),
    *("Falcon, new", "BLOOM", "OPT", "GPT-J", "GPT-BigCode", "Jamba", "Mamba 2"),
    *("ModernBERT", "DeBERTa-v2", "RoBERTa", "ALBERT", "XLNet", "MPNet"),
    *("T5Gemma", "mBART", "Whisper", "Wav2Vec2"),
    *("ViT", "Swin v2", "ConvNeXt", "SegFormer", "DETR", "CLIP", "LLaVA", "Qwen2.5-VL"),
    *("PatchTST", "RecurrentGemma"),
    *("nanoGPT", "Llama, Meta's reference", "vit-pytorch", "nn.Transformer", "nn.LSTM"),
    *("hooks from before", "experts by hand", "weights in the loss"),
]


@pytest.mark.models
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_models_train_exactly_and_write_the_same(
    ranks: StartRanks, name: str, num_ranks: int
) -> None:
    """The library computes in float32 in places; CLIP, all of it."""
    for way in ("slices", "default", "recompute", "generate"):
        if takes(name, way):
            for found in ranks(num_ranks).run(tried, name, way):
                assert found.distance <= 2e-5, (way, found.where)
                assert found.share > 0.9, (way, found.rules)
