"""Families with an encoder and a decoder, and those that hear and that forecast."""

from typing import Any

from benchmarks.rtp.tried.family import HEADS, TEXT, Family, seq2seq
from benchmarks.rtp.tried.sizes import VOCABULARY

SEQ2SEQ = {
    "T5Gemma": Family(
        "T5GemmaForConditionalGeneration",
        {"encoder": TEXT | {"head_dim": 4}, "decoder": TEXT | {"head_dim": 4}},
        generates=True,
    ),
    "UMT5": seq2seq("UMT5", d_kv=4, d_ff=20, **HEADS),
    "mT5": seq2seq("MT5", d_kv=4, d_ff=20, **HEADS),
    "LongT5": seq2seq("LongT5", decoder_start_token_id=0, d_kv=4, d_ff=20, local_radius=3, **HEADS),
    "Switch": seq2seq(
        "SwitchTransformers",
        decoder_start_token_id=0,
        d_kv=4,
        d_ff=20,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=999,
        single=True,
        **HEADS,
    ),
    "NLLB-MoE": seq2seq(
        "NllbMoe",
        single=True,
        num_experts=4,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        expert_capacity=999,
    ),
    "BART": seq2seq("Bart"),
    "mBART": seq2seq("MBart"),
    "Pegasus": seq2seq("Pegasus"),
    "Pegasus-X": seq2seq("PegasusX", block_size=4, num_global_tokens=2),
    "BigBird-Pegasus": seq2seq("BigBirdPegasus", attention_type="original_full"),
    "LED": seq2seq(
        "LED",
        single=True,
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "ProphetNet": seq2seq(
        "ProphetNet",
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        ngram=2,
    ),
    "Blenderbot": seq2seq("Blenderbot"),
    "Blenderbot, small": seq2seq("BlenderbotSmall"),
    "Marian": Family("MarianMTModel", {}, generates=True),
    "M2M-100": seq2seq("M2M100"),
    "FSMT": seq2seq(
        "FSMT",
        single=True,
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        langs=["en", "de"],
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32},
        "features",
        generates=False,
    ),
    "Speech2Text": Family(
        "Speech2TextForConditionalGeneration",
        {
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 32,
        },
        "spectra",
        single=True,
    ),
    "Moonshine": Family(
        "MoonshineForConditionalGeneration",
        {
            "pad_token_id": 0,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "encoder_num_key_value_heads": 4,
            "decoder_num_key_value_heads": 4,
        },
        "sounds",
    ),
}

_SOUND: dict[str, Any] = {
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "ctc_loss_reduction": "mean",
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
SOUND = {
    "Wav2Vec2": Family("Wav2Vec2ForCTC", _SOUND, "speech"),
    "Wav2Vec2, stable": Family(
        "Wav2Vec2ForCTC",
        _SOUND | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"},
        "speech",
    ),
    "HuBERT": Family("HubertForCTC", _SOUND, "speech"),
    "WavLM": Family("WavLMForCTC", _SOUND, "speech"),
    "UniSpeech": Family("UniSpeechForCTC", _SOUND, "speech"),
    "Wav2Vec2-Conformer": Family("Wav2Vec2ConformerForCTC", _SOUND, "speech", alike=True),
    "SpeechT5": Family(
        "SpeechT5ForSpeechToText",
        _SOUND | {"max_text_positions": 32, "max_speech_positions": 64},
        "speech to text",
        single=True,
    ),
    "AST": Family(
        "ASTForAudioClassification",
        {"num_mel_bins": 8, "max_length": 8, "frequency_stride": 4, "time_stride": 4},
        "spectrum classes",
    ),
}

SERIES = {
    "PatchTST": Family(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "ffn_dim": 20,
            "norm_type": "layernorm",
        },
        "series",
    ),
    "PatchTSMixer": Family(
        "PatchTSMixerForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "num_layers": 2,
            "norm_mlp": "LayerNorm",
        },
        "series",
    ),
    "Informer": Family(
        "InformerForPrediction",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 1,
            "input_size": 1,
            "distil": False,
            "attention_type": "full",
        },
        "dated series",
        single=True,
    ),
    "Time series": Family(
        "TimeSeriesTransformerForPrediction",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 1,
            "input_size": 1,
        },
        "dated series",
        single=True,
    ),
    "Autoformer": Family(
        "AutoformerForPrediction",
        {
            "prediction_length": 4,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "num_time_features": 1,
            "input_size": 1,
            "moving_average": 3,
            "label_length": 4,
        },
        "dated series",
        alike=True,
        single=True,
    ),
}
